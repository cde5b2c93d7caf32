"""All rows of stages for partitions that are on given workers, with the best one's time.

A row is built stage by stage; each stage's forwards are timed as it is added. Two rows in which independent stages
of different workers stand in another order are the same: only the first in the order of workers is built (the
lexicographic normal form of A. V. Anisimov and D. E. Knuth, Inhomogeneous sorting, 1979). And a stage is not cut where
that cannot help: where the first part sends nothing to other workers and the second part receives nothing from them,
running them as one is never later, forward or backward, and needs no more memory.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from assigner.solver.free.arrangement import Arrangement, again_s, held_stages, joined
from assigner.solver.free.row_timing import RowTiming
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.solver.free.bounds import Turn
    from assigner.solver.problem.prices import TravellingValue
    from assigner.solver.problem.set_memory import Masks, SetMemory


class StageOrders:
    """The rows of one assignment of partitions to workers.

    Args:
        memory: Prices and memory.
        where: The worker of each position.
        masks: The positions of each worker.
        values: The values that travel.
        turns: Bounds of the assignment.
        take: Takes a better row; returns what the next one must beat.
        limit: What a row must beat, in seconds.
        tick: Counts a stage added; False: stop.
    """

    def __init__(
        self, memory: SetMemory, where: Sequence[int], masks: Sequence[int], values: Sequence[TravellingValue],
        turns: Sequence[Turn], *, take: Callable[[Arrangement], float], limit: float, tick: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._memory, self._table, self._masks, self._values, self._turns = memory, memory.table, masks, values, turns
        self._take, self._limit, self._tick = take, limit, tick
        self._sweep = RowTiming(memory.table, where, values)
        self._sends = [sum(1 << n for n, way in enumerate(values) if way.maker == i) for i in range(len(where))]
        self._reads = [sum(1 << n for n, way in enumerate(values) if i in way.readers) for i in range(len(where))]
        self._row: list[tuple[int, int]] = []
        self._all = sum(masks)
        self.finished = self._more = True
        times = memory.table.micro_batches
        self._forward = [times * self._seconds(w, mask, backward=False) for w, mask in enumerate(masks)]
        self._behind = [
            times * (self._seconds(w, mask, backward=True) + memory.least_s(w, mask))
            + sum([self._table.update_s[w][i] for i in bits(mask)])
            if mask else 0.0
            for w, mask in enumerate(masks)
        ]  # fmt: skip

    def _seconds(self, worker: int, mask: int, *, backward: bool) -> float:
        row = (self._table.backward_s if backward else self._table.forward_s)[worker]
        return sum([row[i] for i in bits(mask)])

    def search(self) -> float:
        """Look at every row; returns what is to be beaten afterwards. `finished` says whether all were looked at."""
        self._extend(0, 0)
        return self._limit

    def _extend(self, done: int, received: int) -> None:
        if done == self._all:
            self._price()
            return
        for worker, stage in self._next(done):
            receives = self._ways_of(self._reads, stage) & ~received
            if not self._is_normal(worker, stage) or self._is_cut_in_vain(worker, receives):
                continue
            if not self._tick():
                self.finished = self._more = False
                return
            sweep = self._sweep
            free, links = sweep.free[worker], list(sweep.links[worker])
            sends = list(bits(self._ways_of(self._sends, stage)))
            end = sweep.forward(worker, tuple(bits(stage)), list(bits(receives)), sends)
            self._row.append((worker, stage))
            if self._bound(worker, stage, done | stage, end) < self._limit:
                self._extend(done | stage, received | receives)
            self._row.pop()
            sweep.free[worker], sweep.links[worker] = free, links
            if not self._more:
                return

    def _next(self, done: int) -> Iterator[tuple[int, int]]:
        """Every stage that can come next, those with many partitions first."""
        before = self._table.before
        for worker, mask in enumerate(self._masks):
            rest = stage = mask & ~done
            while stage:
                known = done | stage
                if all(before[i] & ~known == 0 for i in bits(stage)):
                    yield worker, stage
                stage = (stage - 1) & rest

    @staticmethod
    def _ways_of(table: Sequence[int], stage: int) -> int:
        found = 0
        for i in bits(stage):
            found |= table[i]
        return found

    def _is_normal(self, worker: int, stage: int) -> bool:
        needs = 0
        for i in bits(stage):
            needs |= self._table.before[i]
        for other, mask in reversed(self._row):
            if other == worker or needs & mask:
                return True
            if other > worker:
                return False
        return True

    def _is_cut_in_vain(self, worker: int, receives: int) -> bool:
        if receives:
            return False
        before = next((mask for other, mask in reversed(self._row) if other == worker), 0)
        return before != 0 and self._ways_of(self._sends, before) == 0

    def _bound(self, worker: int, stage: int, done: int, end: float) -> float:
        left = self._seconds(worker, self._masks[worker] & ~done, backward=False) * self._table.micro_batches
        bound = self._sweep.free[worker] + left + self._behind[worker]
        last = [i for i in bits(stage) if not self._table.behind[i] & stage]  # nobody in the stage reads them
        for turn in self._turns:
            bound = max(bound, end + max(turn.tail[i] for i in last) + turn.back_s)
        return bound

    def _price(self) -> None:
        """Time the row with every choice of what to rematerialise."""
        stages = tuple(self._row)
        rows = [(worker, tuple(bits(mask))) for worker, mask in stages]
        held = [(worker, tuple(stages[n][1] for n in numbers)) for worker, numbers in held_stages(stages).items()]
        choices = [self._memory.choices(worker, masks) for worker, masks in held]
        if not all(choices):
            return
        listed = all(self._memory.is_listed(worker, masks) for worker, masks in held)
        many = math.prod(map(len, choices))
        if many > 1 or not listed:
            least = self._least_again(choices, held) if listed else [0.0] * len(stages)
            if self._sweep.finish(rows, least) >= self._limit:
                return
            self.finished = self.finished and listed
        for chosen in itertools.product(*choices):
            if many > 1 and not self._tick():
                self.finished = self._more = False
                return
            again = joined(stages, chosen)
            step = self._sweep.finish(rows, again_s(self._memory, stages, again))
            if step < self._limit:
                self._limit = self._take(Arrangement(self._table, stages, again, step))

    def _least_again(self, choices: Sequence[Sequence[Masks]], held: Sequence[tuple[int, Masks]]) -> list[float]:
        """The least seconds that each stage can be made longer, whatever the others are."""
        least = {}
        for (worker, masks), found in zip(held, choices, strict=True):
            for k, mask in enumerate(masks):
                least[worker, mask] = min(self._memory.again_s(worker, list(bits(each[k]))) for each in found)
        return [least[stage] for stage in self._row]
