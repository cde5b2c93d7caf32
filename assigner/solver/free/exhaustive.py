"""Every placement of a small instance, by branch and bound: the best one, proven.

Partitions are put on workers one by one in topological order; a choice whose bound reaches the target is dropped, and
of workers that are alike only the first unused one is tried. Of every assignment that is left all rows of stages
(rows.py) with all choices of rematerialisation (room.py) are timed as the simulator would.

Source: A. H. Land and A. G. Doig, An automatic method of solving discrete programming problems, 1960.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.solver.free.arrangement import Arrangement, priced
from assigner.solver.free.bounds import Bounds, Turn
from assigner.solver.free.convex import ConvexBounds
from assigner.solver.free.order import stages_in_order
from assigner.solver.free.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.solver.free.room import Room


@dataclass(slots=True)
class _Node:
    bound: float
    turns: list[Turn]
    worker: int


class Exhaustive:
    """One search.

    Args:
        room: Prices and memory.
        one_stage: True: at most one stage a worker; else any number.
        limit: What a plan must beat, in seconds.
        take: Takes a better plan; returns what the next one must beat.
        nodes: So many nodes are looked at: the same answer every time.
        stop: True: the time is over.

    Attributes:
        floor: Least bound of what was not looked at; inf: all was.
    """

    def __init__(
        self, room: Room, *, one_stage: bool, limit: float, take: Callable[[Arrangement], float], nodes: int,
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._room, self._table, self._one_stage = room, room.table, one_stage
        self._limit, self._take, self._nodes, self._stop = limit, take, nodes, stop
        self._bounds, self._convex = Bounds(room), ConvexBounds(room)
        self._n = len(self._table.problem.order)
        self._where = [-1] * self._n
        self._masks = [0] * len(self._table.names)
        self.floor = math.inf

    def run(self) -> bool:
        """Search; True if no plan is below the limit that is left."""
        self._place(0, 0.0, [])
        return math.isinf(self.floor)

    def _tick(self) -> bool:
        self._nodes -= 1
        if self._nodes % 64 == 0 and self._stop():
            self._nodes = 0
        return self._nodes > 0

    def _place(self, i: int, bound: float, turns: list[Turn]) -> None:
        if i == self._n:
            self._finish(bound, turns)
            return
        nodes = sorted(self._children(i, bound), key=lambda node: (node.bound, node.worker))
        for node in nodes:
            if node.bound >= self._limit:
                return
            if self._nodes <= 0:
                self.floor = min(self.floor, node.bound)
                return
            self._where[i] = node.worker
            self._masks[node.worker] |= 1 << i
            self._place(i + 1, node.bound, node.turns)
            self._where[i] = -1
            self._masks[node.worker] ^= 1 << i

    def _children(self, i: int, known: float) -> Iterator[_Node]:
        for worker in self._table.homes[i]:
            if self._may(i, worker):
                self._tick()
                self._where[i] = worker
                self._masks[worker] |= 1 << i
                bound, turns = self._bounds.least(self._where, self._masks)
                if self._one_stage and bound < self._limit:
                    bound = max(bound, self._convex_bound())
                if not math.isinf(bound):
                    yield _Node(max(bound, known), turns, worker)
                self._where[i] = -1
                self._masks[worker] ^= 1 << i

    def _may(self, i: int, worker: int) -> bool:
        """False if a hint or a missing link forbids it, or a like worker stands for this one."""
        table, mask = self._table, self._masks[worker]
        if not mask and sum(map(bool, self._masks)) >= table.problem.most_workers:
            return False
        if not mask and any(table.group[w] == table.group[worker] and not self._masks[w] for w in range(worker)):
            return False
        if table.apart[i] & mask or table.together[i] & ~mask & ((1 << i) - 1):
            return False
        return self._may_talk(i, worker)

    def _may_talk(self, i: int, worker: int) -> bool:
        """True if the workers of what the partition reads can send to, and hear from, this worker."""
        table = self._table
        for maker, value, reader, gradient in table.edges:
            if reader == i and self._where[maker] != worker:
                source = self._where[maker]
                if not table.problem.follows(table.names[source], table.names[worker]):
                    return False
                if math.isinf(table.wires[value][source][worker].seconds):
                    return False
                if gradient and math.isinf(table.wires[value][worker][source].seconds):
                    return False
        return True

    def _convex_bound(self) -> float:
        """A bound with one stage a worker; inf: two stages wait for each other, whatever comes."""
        stages = stages_in_order(self._table.before, self._masks)
        return math.inf if stages is None else self._convex.least(self._where, stages)

    def _finish(self, bound: float, turns: list[Turn]) -> None:
        """Time all rows of a whole assignment."""
        ways = self._table.ways(self._where)
        if ways is None:
            return
        if self._one_stage:
            stages = stages_in_order(self._table.before, self._masks)
            assert stages is not None
            found = priced(self._room, stages)
            if found is not None and found.step_s < self._limit:
                self._limit = self._take(found)
            return
        rows = Rows(
            self._room, self._where, self._masks, ways, turns, take=self._take, limit=self._limit, tick=self._tick
        )
        self._limit = rows.search()
        if not rows.finished:
            self.floor = min(self.floor, bound)
