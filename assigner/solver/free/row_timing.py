"""The step time of stages in a row: stage by stage forward, then stage by stage backward.

Every worker runs its stages in the row's order, all micro-batches of one before the next, and backward the other way
round. So when a stage's turn comes in the row, all that it waits for has been timed: no queue, no waiting. The result
is the simulator's to the last bit, with a wire for each link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from assigner.schedule.cost import MessageTime
    from assigner.solver.problem.prices import PriceTable, TravellingValue

    Messages = list[list[tuple[int, MessageTime]]]

Row = Sequence[tuple[int, Sequence[int]]]
"""Stages in a topological order: each a worker and its positions, smallest first."""


Sent = tuple[list[float], int, float]
"""A value that is made: its arrivals by micro-batch, the worker that it goes to, seconds on the wire."""


class RowTiming:
    """The state of a step while its stages are timed.

    Attributes:
        free: When each worker is free.
        links: When each link is free, by sender and receiver.
        there: When each activation arrives, by way and micro-batch.
        sends, reads, grades: By position the mask of the ways whose value it makes, reads, and adds to the gradient of.
    """

    def __init__(self, table: PriceTable, where: Sequence[int], values: Sequence[TravellingValue]) -> None:
        self.table, self.where, self.values = table, where, values
        count = len(table.names)
        self.free = [0.0] * count
        self.links = [[0.0] * count for _ in range(count)]
        self.there: list[list[float]] = [[] for _ in values]
        self.sends, self.reads, self.grades = ([0] * len(where) for _ in range(3))
        for n, way in enumerate(values):
            self.sends[way.maker] |= 1 << n
            for i in way.readers:
                self.reads[i] |= 1 << n
            for i in way.graded:
                self.grades[i] |= 1 << n

    def forward(self, worker: int, positions: Sequence[int], receives: Sequence[int], sends: Sequence[int]) -> float:
        """Time a stage's forwards, with ways that first come to its worker, and those made here; the last one's end."""
        row, busy = self.table.forward_s[worker], 0.0
        seconds = sum([row[i] for i in positions])
        for n in receives:
            busy += self.values[n].there.receiver_s
        arrivals = [self.there[n] for n in receives]
        mine = self.links[worker]
        out: list[Sent] = []
        for n in sends:
            way = self.values[n]
            busy += way.there.sender_s
            made = [0.0] * self.table.micro_batches
            self.there[n] = made
            out.append((made, way.target, way.there.seconds))
        order = range(self.table.micro_batches)
        end, self.free[worker] = _play(order, self.free[worker], seconds, busy, arrivals, out, mine)
        return end

    def finish(self, stages: Row, again_s: Sequence[float]) -> float:
        """Time all backwards, ties and updates behind the forwards, stages in the order of these; the step in seconds.

        `again_s` is what each stage's backward takes longer because of rematerialisation.
        """
        free, links = list(self.free), [list(row) for row in self.links]
        into, out = self._back_ways(stages)
        back = [[0.0] * self.table.micro_batches for _ in self.values]
        first = {worker: s for s, (worker, _) in reversed(list(enumerate(stages)))}
        ties: list[tuple[int, float]] = []
        for s in range(len(stages) - 1, -1, -1):
            worker, positions = stages[s]
            row, busy = self.table.backward_s[worker], 0.0
            seconds = sum([row[i] for i in positions]) + again_s[s]
            mine, sends = links[worker], []
            for _, wire in into[s]:
                busy += wire.receiver_s
            for n, wire in out[s]:
                busy += wire.sender_s
                sends.append((back[n], self.values[n].source, wire.seconds))
            arrivals = [back[n] for n, _ in into[s]]
            order = range(self.table.micro_batches - 1, -1, -1)
            end, now = _play(order, free[worker], seconds, busy, arrivals, sends, mine)
            if first[worker] == s:
                now = self._send_ties(worker, mine, end, busy, ties)
            free[worker] = now
        return self._update(stages, free, ties)

    def _back_ways(
        self, stages: Row
    ) -> tuple[list[list[tuple[int, MessageTime]]], list[list[tuple[int, MessageTime]]]]:
        """Of each stage the gradients that its backward waits for, and those that it makes: (way, message)."""
        stage_of = {i: s for s, (_, positions) in enumerate(stages) for i in positions}
        into: Messages = [[] for _ in stages]
        out: Messages = [[] for _ in stages]
        for n, way in enumerate(self.values):
            if way.back is not None:
                into[stage_of[way.maker]].append((n, way.back))
                out[min(stage_of[i] for i in way.graded)].append((n, way.back))
        return into, out

    def _send_ties(
        self, worker: int, links: list[float], end: float, busy: float, sent: list[tuple[int, float]]
    ) -> float:
        """Send a worker's gradients of shared parameters behind its last backward; when it is free again."""
        for members, wires in self.table.ties:
            holders = list(dict.fromkeys(self.where[i] for i in members))
            if worker in holders:
                for target in holders:
                    if target != worker:
                        wire = wires[worker][target]
                        links[target] = max(links[target], end) + wire.seconds
                        busy += wire.sender_s
                        sent.append((target, links[target]))
        return end + busy

    def _update(self, stages: Row, free: list[float], ties: Sequence[tuple[int, float]]) -> float:
        for target, arrival in ties:
            free[target] = max(free[target], arrival)
        seconds: dict[int, float] = {}
        for worker, positions in stages:
            for i in positions:
                seconds[worker] = seconds.get(worker, 0) + self.table.update_s[worker][i]
        return max(free[worker] + longer for worker, longer in seconds.items())


def row_step_s(table: PriceTable, stages: Row, again_s: Sequence[float]) -> float | None:
    """The step time of a whole row, in seconds, with those of recomputing in each stage; None: a link is missing."""
    where = [0] * len(table.problem.order)
    for worker, positions in stages:
        for i in positions:
            where[i] = worker
    values = table.travelling(where)
    if values is None:
        return None
    sweep, got = RowTiming(table, where, values), 0
    for worker, positions in stages:
        receives = union(sweep.reads, positions) & ~got
        got |= receives
        sweep.forward(worker, positions, list(bits(receives)), list(bits(union(sweep.sends, positions))))
    return sweep.finish(stages, again_s)


def union(masks: Sequence[int], positions: Iterable[int]) -> int:
    """What any of these positions has in its mask."""
    found = 0
    for i in positions:
        found |= masks[i]
    return found


def _play(  # noqa: PLR0917 - called for every stage of every placement
    order: range, free: float, seconds: float, busy: float, arrivals: Sequence[Sequence[float]],
    sends: Sequence[Sent], links: list[float],
) -> tuple[float, float]:  # fmt: skip
    """Time one stage's forwards or backwards and the messages that they make, which keep its worker busy behind each.

    What is sent, and `links` by the worker at their other end, are brought up to date. The end of the last micro-batch,
    and when the worker is free.
    """
    end = 0.0
    for m in order:
        start = free
        for arrival in arrivals:
            if arrival[m] > start:  # noqa: PLR1730 - the innermost loop
                start = arrival[m]
        end = start + seconds
        for made, target, wire_s in sends:
            begin = links[target]
            if end > begin:  # noqa: PLR1730
                begin = end
            begin += wire_s
            links[target] = begin
            made[m] = begin
        free = end + busy
    return end, free
