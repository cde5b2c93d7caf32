"""Every placement of a small instance, by branch and bound: the best one, proven.

Partitions are put on workers one by one in topological order; a choice whose bound reaches the target is dropped, and
of workers that are alike only the first unused one is tried. Of every assignment that is left all rows of stages
(`StageOrders`) with all choices of rematerialisation (set_memory.py) are timed as the simulator would. With one stage a
worker an assignment has one price (pricing.py).

Source: A. H. Land and A. G. Doig, An automatic method of solving discrete programming problems, 1960.
"""

from __future__ import annotations

import itertools
import math
from operator import itemgetter
from typing import TYPE_CHECKING

from assigner.solver.free.pricing import Arrangement, again_s, held_stages, joined
from assigner.solver.free.row_timing import RowTiming, union
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.solver.free.bounds import Turn
    from assigner.solver.free.pricing import BoundedPricing
    from assigner.solver.problem.prices import TravellingValue
    from assigner.solver.problem.set_memory import Masks


class Exhaustive:
    """One search.

    Args:
        limit: What a plan must beat, in seconds.
        take: Takes a better plan; returns what the next one must beat. Unless given it is the plan's value.

    Attributes:
        found: The placements that were better, in the order in which they were found.
        floor: No placement takes less than the lesser of this and `limit`, whatever it rematerialises.
        limit: What a placement has to beat by now: what is not below it was passed over.
    """

    def __init__(
        self, pricing: BoundedPricing, *, limit: float, nodes: int, stop: Callable[[], bool],
        take: Callable[[Arrangement], float] = lambda found: found.value_s,
    ) -> None:  # fmt: skip
        self._pricing, self._memory, self._table = pricing, pricing.memory, pricing.memory.table
        self.limit, self._take, self._nodes, self._stop = limit, take, nodes, stop
        self._n = len(self._table.problem.order)
        self._where = [-1] * self._n
        self._masks = [0] * len(self._table.names)
        self.floor, self._ended = math.inf, True
        self.found: list[Arrangement] = []

    def run(self) -> bool:
        """Search; True if everything below the limit was looked at."""
        self._place(0, 0.0, [])
        return self._ended

    def keep(self, found: Arrangement) -> None:
        """Take a placement that is below the limit."""
        self.found.append(found)
        self.limit = self._take(found)

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
            if least >= self.limit:
                return
            if self._nodes <= 0:
                self.floor, self._ended = min(self.floor, least), False
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
                bound, turns = self._pricing.least(self._where, self._masks, self.limit)
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
            if found is not None:
                self.floor = min(self.floor, max(bound, found.value_s * found.exactness))
                if found.value_s < self.limit:
                    self.keep(found)
            return
        rows = StageOrders(self, values, turns)
        rows.run()
        self.floor = min(self.floor, max(bound, rows.floor) if rows.finished else bound)
        self._ended = self._ended and rows.finished


class StageOrders:
    """The rows of stages of one assignment of partitions to workers, the best one with its time.

    A row is built stage by stage; each stage's forwards are timed as it is added. Two rows in which independent stages
    of different workers stand in another order are the same: only the first in the order of workers is built (the
    lexicographic normal form of A. V. Anisimov and D. E. Knuth, Inhomogeneous sorting, 1979). And a stage is not cut
    where that cannot help: where the first part sends nothing to other workers and the second part receives nothing
    from them, running them as one is never later, forward or backward, and needs no more memory.

    Attributes:
        finished: Whether all rows below the limit were looked at, with all that they may rematerialise.
        floor: If all were, no row takes less than the lesser of this and the limit, whatever it rematerialises.
    """

    def __init__(self, search: Exhaustive, values: Sequence[TravellingValue], turns: Sequence[Turn]) -> None:
        memory, where, masks = search._memory, search._where, search._masks
        self._search, self._memory, self._table = search, memory, memory.table
        self._masks, self._turns = masks, turns
        self._sweep = RowTiming(memory.table, where, values)
        self._row: list[tuple[int, int]] = []
        self._all = sum(masks)
        self.finished = self._more = True
        self.floor = math.inf
        times = memory.table.micro_batches
        self._behind = [
            times * (self._seconds(w, mask, backward=True) + memory.least_s(w, mask))
            + sum([self._table.update_s[w][i] for i in bits(mask)])
            if mask else 0.0
            for w, mask in enumerate(masks)
        ]  # fmt: skip

    def _seconds(self, worker: int, mask: int, *, backward: bool) -> float:
        row = (self._table.backward_s if backward else self._table.forward_s)[worker]
        return sum([row[i] for i in bits(mask)])

    def run(self) -> None:
        """Look at every row. `finished` says whether all were looked at."""
        self._extend(0, 0)

    def _extend(self, done: int, received: int) -> None:
        if done == self._all:
            self._price()
            return
        for worker, stage in self._next(done):
            receives = union(self._sweep.reads, bits(stage)) & ~received
            if not self._is_normal(worker, stage) or self._is_cut_in_vain(worker, stage, done, receives):
                continue
            if not self._search._tick():
                self.finished = self._more = False
                return
            sweep = self._sweep
            free, links = sweep.free[worker], list(sweep.links[worker])
            sends = list(bits(union(sweep.sends, bits(stage))))
            end = sweep.forward(worker, tuple(bits(stage)), list(bits(receives)), sends)
            self._row.append((worker, stage))
            if self._bound(worker, stage, done | stage, end) < self._search.limit:
                self._extend(done | stage, received | receives)
            self._row.pop()
            sweep.free[worker], sweep.links[worker] = free, links
            if not self._more:
                return

    def _next(self, done: int) -> Iterator[tuple[int, int]]:
        """Every stage that can come next, those with many partitions first."""
        for worker, mask in enumerate(self._masks):
            rest = stage = mask & ~done
            while stage:
                kept = self._obstacle(stage, rest, done)
                if kept < 0:
                    yield worker, stage
                stage = ((stage >> kept << kept if kept > 0 else stage) - 1) & rest

    def _obstacle(self, stage: int, rest: int, done: int) -> int:
        """The position from which on a stage of `rest` has to be another one to come next; -1: it can come next.

        Where a partition lacks what it reads, so it does whatever stands below both of them: of a chain all those
        stages are passed over at once.
        """
        before, found = self._table.before, -1
        for i in bits(stage):
            missing = before[i] & ~(done | stage)
            if missing:
                found = max(found, i if missing & ~rest else min(i, missing.bit_length() - 1))
        return found

    def _is_normal(self, worker: int, stage: int) -> bool:
        needs = union(self._table.before, bits(stage))
        for other, mask in reversed(self._row):
            if other == worker or needs & mask:
                return True
            if other > worker:
                return False
        return True

    def _is_cut_in_vain(self, worker: int, stage: int, done: int, receives: int) -> bool:
        """Joined with the worker's stage before it nothing would start later.

        It waits for no value of its own, nobody waits for one of that stage, and no gradient leaves with its backward:
        that leaves with the first stage that adds to it, whose backward comes last.
        """
        grades, sends = self._sweep.grades, self._sweep.sends
        if receives or union(grades, bits(stage)) & ~union(grades, bits(done)):
            return False
        before = next((mask for other, mask in reversed(self._row) if other == worker), 0)
        return before != 0 and union(sends, bits(before)) == 0

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
        exactness = min(self._memory.exactness(worker, masks) for worker, masks in held)
        if many > 1 or not listed:
            least = self._least_again(choices, held) if listed else [0.0] * len(stages)
            if self._sweep.finish(rows, least) * exactness >= self._search.limit:
                return
            self.finished = self.finished and listed
        for chosen in itertools.product(*choices):
            if many > 1 and not self._search._tick():
                self.finished = self._more = False
                return
            again = joined(stages, chosen)
            step = self._sweep.finish(rows, again_s(self._memory, stages, again))
            self.floor = min(self.floor, step * exactness)
            if step < self._search.limit:
                self._search.keep(Arrangement(self._table, stages, again, step))

    def _least_again(self, choices: Sequence[Sequence[Masks]], held: Sequence[tuple[int, Masks]]) -> list[float]:
        """The least seconds that each stage can be made longer, whatever the others are."""
        least = {}
        for (worker, masks), found in zip(held, choices, strict=True):
            for k, mask in enumerate(masks):
                least[worker, mask] = min(self._memory.again_s(worker, list(bits(each[k]))) for each in found)
        return [least[stage] for stage in self._row]
