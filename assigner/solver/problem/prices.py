"""What everything costs at one micro-batch count: the tables that every search starts from.

prices[worker][i]         what partition i costs on a worker, by its number in `Problem.workers`
travelling(where)         the messages of any placement
intervals                 the same for stages that are intervals of the order, by groups of like workers
                          (interval_prices.py)

Sets of positions are bit masks: searches price many thousands of placements.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.problem.interval_prices import IntervalPrices
from assigner.solver.problem.options import samples_in_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.schedule.cost import MessageTime, PartitionCost
    from assigner.solver.problem.problem import Problem


class TravellingValue(NamedTuple):
    """The way of one value to one other worker.

    Args:
        maker: The position that makes it.
        source: The maker's worker.
        target: The worker that reads it.
        readers: Positions on that worker that read it.
        graded: Those of them that add to its gradient.
        there: The message of its activation.
        back: The message of its gradient; None: it has none.
    """

    maker: int
    source: int
    target: int
    readers: tuple[int, ...]
    graded: tuple[int, ...]
    there: MessageTime
    back: MessageTime | None


def bits(mask: int) -> Iterator[int]:
    """The positions in a mask, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _by_worker(figure: str) -> cached_property[tuple[tuple[float, ...], ...]]:
    """A figure of `PartitionCost` per worker and position; inf: not there."""

    def found(table: PriceTable) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(getattr(price, figure) if price else math.inf for price in row) for row in table.prices)

    return cached_property(found)


class PriceTable:
    """The problem at one micro-batch count, M; everything is priced when it is first asked for.

    Attributes:
        size: Samples in a micro-batch.
        forward_s, backward_s, recompute_s, update_s: Seconds per worker and position, backwards without recomputing;
            inf: not there.
    """

    def __init__(self, problem: Problem, micro_batches: int) -> None:
        self.problem, self.micro_batches = problem, micro_batches
        self.size = samples_in_each(problem.workload.batch_size, micro_batches)
        self._costs: dict[tuple[str, frozenset[str]], tuple[PartitionCost | None, ...]] = {}
        self._measured: dict[str, tuple[PartitionCost | None, ...]] = {}

    @property
    def most_workers(self) -> int:
        """No plan has more workers than this: of a steady state no more than micro-batches, so that all are at work."""
        most = self.problem.most_workers
        return min(most, self.micro_batches) if self.problem.options.objective == "throughput" else most

    @cached_property
    def intervals(self) -> IntervalPrices:
        """What stages cost that are intervals of the order."""
        return IntervalPrices(self)

    def measured(self, worker: str) -> tuple[PartitionCost | None, ...]:
        """What each partition costs on a worker, whatever the hints say; None: it was not measured, or does not run."""
        like, cost = self.problem.cost.first_alike[worker], self.problem.cost
        if like not in self._measured:
            self._measured[like] = tuple(
                None if cost.obstacle(name, like, self.size) else cost.partition(name, like, self.size)
                for name in self.problem.order
            )
        return self._measured[like]

    def costs(self, worker: str) -> tuple[PartitionCost | None, ...]:
        """What each partition costs on a worker; None: it may not, or cannot, be placed there.

        Of workers that have the same prices and may hold the same partitions it is one and the same tuple.
        """
        barred = self.problem.barred[worker]
        key = self.problem.cost.first_alike[worker], barred
        if key not in self._costs:
            self._costs[key] = tuple(
                None if name in barred else price
                for name, price in zip(self.problem.order, self.measured(worker), strict=True)
            )
        return self._costs[key]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the workers, by number."""
        return tuple(worker.name for worker in self.problem.workers)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """By the number of a worker that of its group of like ones."""
        return tuple(self.intervals.group_of[name] for name in self.names)

    @cached_property
    def prices(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """Per worker and position: what the partition costs there; None: it may not, or cannot, be placed there."""
        return tuple(self.costs(name) for name in self.names)

    forward_s = _by_worker("forward_s")
    recompute_s = _by_worker("recompute_s")
    backward_s = _by_worker("backward_s")
    update_s = _by_worker("update_s")

    @cached_property
    def least_s(self) -> tuple[float, ...]:
        """Per position: seconds of one forward and one backward where they take least; 0: it may be nowhere."""
        both = np.add(self.forward_s, self.backward_s).min(axis=0)
        return tuple(np.where(np.isfinite(both), both, 0.0).tolist())

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Per position: the workers on which it may be."""
        workers = range(len(self.names))
        return tuple(tuple(w for w in workers if self.prices[w][i] is not None) for i in range(len(self.problem.order)))

    @cached_property
    def together(self) -> tuple[int, ...]:
        """Per position: the positions that must be on the same worker, itself too."""
        at, held = self.problem.position, self.problem.together
        return tuple(sum(1 << at[other] for other in held[name]) for name in self.problem.order)

    @cached_property
    def apart(self) -> tuple[int, ...]:
        """Per position: the positions that must not be on the same worker."""
        found = [0] * len(self.problem.order)
        for group in self.problem.options.apart:
            mask = sum(1 << self.problem.position[name] for name in group)
            for i in bits(mask):
                found[i] |= mask & ~(1 << i)
        return tuple(found)

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int, bool], ...]:
        """(maker, number of the value, reader, whether with gradient), in the order of the profile's edges."""
        outputs = {(edge.source, edge.output): 0 for edge in self.problem.profile.edges}
        number = {key: n for n, key in enumerate(outputs)}
        at = self.problem.position
        return tuple(
            (at[edge.source], number[edge.source, edge.output], at[edge.target], edge.gradient)
            for edge in self.problem.profile.edges
        )

    @cached_property
    def bytes(self) -> tuple[float, ...]:
        """Of each value, for one micro-batch."""
        sizes: dict[tuple[str, int], float] = {}
        for edge in self.problem.profile.edges:
            sizes[edge.source, edge.output] = edge.bytes_per_sample * self.size + edge.fixed_bytes
        return tuple(sizes.values())

    @cached_property
    def wires(self) -> tuple[tuple[tuple[MessageTime, ...], ...], ...]:
        """Per value, sender and receiver: the message; seconds are inf without a link."""
        found = {size: self._wires(size) for size in set(self.bytes)}
        return tuple(found[size] for size in self.bytes)

    @cached_property
    def ties(self) -> tuple[tuple[tuple[int, ...], tuple[tuple[MessageTime, ...], ...]], ...]:
        """Of each shared parameter: the positions that hold it, and its message by sender and receiver."""
        at = self.problem.position
        return tuple(
            (tuple(at[name] for name in tie.partitions), self._wires(tie.bytes)) for tie in self.problem.profile.ties
        )

    def _wires(self, size: float) -> tuple[tuple[MessageTime, ...], ...]:
        cost = self.problem.cost
        return tuple(tuple(cost.message(u, v, size) for v in self.names) for u in self.names)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Per position: the positions whose values it reads."""
        found = [0] * len(self.problem.order)
        for maker, _, reader, _ in self.edges:
            found[reader] |= 1 << maker
        return tuple(found)

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Per position: the positions that read its values."""
        found = [0] * len(self.problem.order)
        for maker, _, reader, _ in self.edges:
            found[maker] |= 1 << reader
        return tuple(found)

    def may(self, stages: Sequence[tuple[int, int]]) -> bool:
        """False if a hint, or a missing price, forbids stages given as (worker, mask of positions)."""
        masks: dict[int, int] = {}
        for worker, mask in stages:
            masks[worker] = masks.get(worker, 0) | mask
        if len(masks) > self.most_workers:
            return False
        for worker, mask in masks.items():
            for i in bits(mask):
                if self.prices[worker][i] is None or self.apart[i] & mask or self.together[i] & ~mask:
                    return False
        if not self.problem.options.order:
            return True
        where = {i: worker for worker, mask in masks.items() for i in bits(mask)}
        return all(
            where[maker] == where[reader] or self.problem.follows(self.names[where[maker]], self.names[where[reader]])
            for maker, _, reader, _ in self.edges
        )

    def in_order(
        self, masks: Sequence[int], choose: Callable[[Sequence[int], int], int] = lambda ready, _: ready[0]
    ) -> tuple[tuple[int, int], ...] | None:
        """One stage for each worker's positions, in a topological order; None: two of them wait for each other.

        Args:
            masks: Positions of each worker; those of all workers need not be all there are.
            choose: Which comes next of the workers whose stages wait for no other, with so many stages left; the first.
        """
        placed = sum(masks)
        needs = {}
        for worker, mask in enumerate(masks):
            if mask:
                read = 0
                for i in bits(mask):
                    read |= self.before[i]
                needs[worker] = read & placed & ~mask
        done, stages = 0, []
        while needs:
            ready = [worker for worker, need in needs.items() if need & ~done == 0]
            if not ready:
                return None
            chosen = choose(ready, len(needs))
            stages.append((chosen, masks[chosen]))
            done |= masks[chosen]
            del needs[chosen]
        return tuple(stages)

    def travelling(self, where: Sequence[int]) -> tuple[TravellingValue, ...] | None:
        """All values that travel when position i is on worker `where[i]`; None: a link that they need is missing.

        In the order in which a stage sends them (schedule/program.py).
        """
        found: dict[tuple[int, int], tuple[int, list[int], list[int]]] = {}
        for maker, value, reader, gradient in self.edges:
            target = where[reader]
            if where[maker] != target:
                key = (value, target)
                old = found.get(key)
                if old is None:
                    found[key] = (maker, [reader], [reader] if gradient else [])
                else:
                    old[1].append(reader)
                    if gradient:
                        old[2].append(reader)
        values = []
        for (value, target), (maker, readers, graded) in found.items():
            source, wires = where[maker], self.wires[value]
            there, back = wires[source][target], wires[target][source] if graded else None
            if math.isinf(there.seconds) or (back is not None and math.isinf(back.seconds)):
                return None
            values.append(TravellingValue(maker, source, target, tuple(readers), tuple(graded), there, back))
        for members, wires in self.ties:
            holders = {where[i] for i in members}
            if any(math.isinf(wires[u][v].seconds) for u in holders for v in holders if u != v):
                return None
        return tuple(values)
