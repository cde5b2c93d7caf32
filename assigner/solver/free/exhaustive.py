"""Every placement of a small instance, by branch and bound: the best one, proven.

Partitions are put on workers one by one in topological order; a choice whose bound reaches the target is dropped, and
of workers that are alike only the first unused one is tried. Of every assignment that is left all rows of stages
(stage_orders.py) with all choices of rematerialisation (set_memory.py) are timed as the simulator would. With one stage
a worker an assignment has one price (pricing.py).

Source: A. H. Land and A. G. Doig, An automatic method of solving discrete programming problems, 1960.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING

from assigner.solver.free.stage_orders import StageOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.solver.free.arrangement import Arrangement
    from assigner.solver.free.bounds import Turn
    from assigner.solver.free.pricing import BoundedPricing


class Exhaustive:
    """One search.

    Args:
        pricing: Bounds and values.
        limit: What a plan must beat, in seconds.
        take: Takes a better plan; returns what the next one must beat.
        nodes: So many nodes are looked at: the same answer every time.
        stop: True: the time is over.

    Attributes:
        floor: Least bound of what was not looked at; inf: all was.
    """

    def __init__(
        self, pricing: BoundedPricing, *, limit: float, take: Callable[[Arrangement], float], nodes: int,
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._pricing, self._memory, self._table = pricing, pricing.memory, pricing.memory.table
        self._limit, self._take, self._nodes, self._stop = limit, take, nodes, stop
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
        for least, worker, further in sorted(self._children(i, bound), key=itemgetter(0, 1)):
            if least >= self._limit:
                return
            if self._nodes <= 0:
                self.floor = min(self.floor, least)
                return
            self._where[i] = worker
            self._masks[worker] |= 1 << i
            self._place(i + 1, least, further)
            self._where[i] = -1
            self._masks[worker] ^= 1 << i

    def _children(self, i: int, known: float) -> Iterator[tuple[float, int, list[Turn]]]:
        """The bound, the worker and the turns of each choice for a position."""
        for worker in self._table.homes[i]:
            if self._may(i, worker):
                self._tick()
                self._where[i] = worker
                self._masks[worker] |= 1 << i
                bound, turns = self._pricing.least(self._where, self._masks, self._limit)
                if not math.isinf(bound):
                    yield max(bound, known), worker, turns
                self._where[i] = -1
                self._masks[worker] ^= 1 << i

    def _may(self, i: int, worker: int) -> bool:
        """False if a hint or a missing link forbids it, or a like worker stands for this one."""
        table, mask = self._table, self._masks[worker]
        if not mask and sum(map(bool, self._masks)) >= table.most_workers:
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

    def _finish(self, bound: float, turns: list[Turn]) -> None:
        """Time all rows of a whole assignment."""
        values = self._table.travelling(self._where)
        if values is None:
            return
        if self._pricing.one_stage:
            stages = self._table.in_order(self._masks)
            assert stages is not None
            found = self._pricing.price(stages)
            if found is not None and found.value_s < self._limit:
                self._limit = self._take(found)
            return
        rows = StageOrders(
            self._memory, self._where, self._masks, values, turns, take=self._take, limit=self._limit, tick=self._tick
        )
        self._limit = rows.search()
        if not rows.finished:
            self.floor = min(self.floor, bound)
