"""Everything about one micro-batch count in numbers: what partitions, values and shared parameters cost where.

Partitions are positions in the problem's order, workers are numbers in `profile.workers`, sets of positions are bit
masks: searches price many thousands of placements.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.schedule.timing import MessageTime
from assigner.solver.problem.prices import PriceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.schedule.cost import PartitionCost


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


class SetPrices(PriceTable):
    """The same prices by worker, and what sets of positions need that are no intervals."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the workers, by number."""
        return tuple(worker.name for worker in self.problem.workers)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """Of each worker the number of its group of like ones."""
        number = {name: k for k, members in enumerate(self.groups) for name in members}
        return tuple(number[name] for name in self.names)

    @cached_property
    def prices(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """Per worker and position: what the partition costs there; None: it may not, or cannot, be placed there."""
        return tuple(self.costs(name) for name in self.names)

    @cached_property
    def forward_s(self) -> tuple[tuple[float, ...], ...]:
        """Per worker and position: seconds of one forward; inf: not there."""
        return self._all("forward_s")

    @cached_property
    def recompute_s(self) -> tuple[tuple[float, ...], ...]:
        """The same of what rematerialising adds."""
        return self._all("recompute_s")

    @cached_property
    def backward_s(self) -> tuple[tuple[float, ...], ...]:
        """The same of one backward, without recomputing."""
        return self._all("backward_s")

    @cached_property
    def update_s(self) -> tuple[tuple[float, ...], ...]:
        """The same of the optimizer's update."""
        return self._all("update_s")

    @cached_property
    def least_s(self) -> tuple[float, ...]:
        """Per position: seconds of one forward and one backward where they take least; 0: it may be nowhere."""
        both = np.add(self.forward_s, self.backward_s).min(axis=0)
        return tuple(np.where(np.isfinite(both), both, 0.0).tolist())

    def _all(self, name: str) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(getattr(price, name) if price else math.inf for price in row) for row in self.prices)

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Per position: the workers on which it may be."""
        workers = range(len(self.names))
        return tuple(tuple(w for w in workers if self.prices[w][i] is not None) for i in range(len(self.problem.order)))

    @cached_property
    def together(self) -> tuple[int, ...]:
        """Per position: the positions that must be on the same worker, itself too."""
        label = [self.problem.profile.partition[name].colocate for name in self.problem.order]
        return tuple(
            sum(1 << j for j, other in enumerate(label) if i == j or (mine is not None and mine == other))
            for i, mine in enumerate(label)
        )

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
        return tuple(
            tuple(MessageTime(cost.transfer_s(u, v, size), *cost.busy_s(u, v, size)) for v in self.names)
            for u in self.names
        )

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
