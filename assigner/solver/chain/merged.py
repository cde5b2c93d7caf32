"""A coarser problem that bounds the real one: workers of one kind count as alike, each at the best price of them all.

Where every link was measured by itself, no two workers are quite alike, and a proof must tell apart what hardly
differs. Taking, for the workers of one kind, the least of every price (each time of each stage and each boundary by
itself) can only make plans faster, so no real plan beats the best merged one; and with few groups that is proven
quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.cost import PartitionCost
from assigner.solver.instance import Hop, Instance
from assigner.solver.segments import Column

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class MergedInstance(Instance):
    """An instance whose groups are kinds of workers.

    Args:
        problem: As of the real one.
        micro_batches: As of the real one.
        real: The instance to bound.
    """

    real: Instance

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the real groups in each merged one."""
        found: dict[tuple[str, int, float], list[int]] = {}
        for number, group in enumerate(self.real.groups):
            worker = self.problem.profile.worker[group[0]]
            found.setdefault((worker.kind, worker.threads, worker.tensor_bytes), []).append(number)
        return tuple(map(tuple, found.values()))

    @property
    def merges(self) -> bool:
        """True if the merged problem is smaller than the real one."""
        return len(self.kinds) < len(self.real.groups)

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        return {number: kind for kind, numbers in enumerate(self.kinds) for number in numbers}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Worker names by kind."""
        return tuple(tuple(name for number in numbers for name in self.real.groups[number]) for numbers in self.kinds)

    @cached_property
    def prices(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """Per kind and position the least of each time; memory plays no part any more."""
        return tuple(
            tuple(
                _cheapest([self.real.prices[number][i] for number in numbers]) for i in range(len(self.problem.order))
            )
            for numbers in self.kinds
        )

    @cached_property
    def columns(self) -> dict[tuple[int, int, int], Column]:
        """Of each segment and kind the least of each time."""
        found: dict[tuple[int, int, int], Column] = {}
        for column in self.real.columns.values():
            key = (column.first, column.last, self._kind_of[column.group])
            old = found.get(key, column)
            found[key] = Column(
                *key,
                min(old.forward_s, column.forward_s),
                min(old.backward_s, column.backward_s),
                min(old.update_s, column.update_s),
            )
        return found

    @cached_property
    def hops(self) -> dict[tuple[int, int, int], Hop]:
        """Of each boundary and pair of kinds the least of each time."""
        found: dict[tuple[int, int, int], Hop] = {}
        for (i, left, right), hop in self.real.hops.items():
            key = (i, self._kind_of[left], self._kind_of[right])
            old = found.get(key, hop)
            found[key] = Hop(
                min(old.forward_s, hop.forward_s),
                min(old.backward_s, hop.backward_s),
                _least(old.forward_busy, hop.forward_busy),
                _least(old.backward_busy, hop.backward_busy),
            )
        return found

    def hop(self, i: int, left: int, right: int) -> Hop | None:
        """One boundary; None: it cannot be."""
        return self.hops.get((i, left, right))


def _cheapest(prices: Sequence[PartitionCost | None]) -> PartitionCost | None:
    found = [price for price in prices if price is not None]
    if not found:
        return None
    return PartitionCost(
        min(price.forward_s for price in found),
        min(price.backward_s for price in found),
        min(price.update_s for price in found),
        0.0,
        0.0,
        min(price.recompute_s for price in found),
    )


def _least(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), min(one[1], other[1])
