"""Prices of workers that differ in their links alone, taken for alike: a relaxation with few sets of workers.

Where every worker has links of its own, eight of them have 247 sets that may share a stage; of three kinds they have
some forty. Each boundary and each tie is at its least between any two of the kinds, so no pipeline costs more here.
"""

from __future__ import annotations

import itertools
from functools import cached_property

from assigner.solver.prices import Hop, PriceTable


class KindTable(PriceTable):
    """The problem at one micro-batch count, workers with the same prices and capacity in one group.

    Args:
        table: The workers one by one.
    """

    links_alike = False

    def __init__(self, table: PriceTable) -> None:
        super().__init__(table.problem, table.micro_batches)
        self._table = table
        self._kinds = [[n for n, like in enumerate(table.like) if like == first] for first in sorted(set(table.like))]

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The workers of each kind."""
        return tuple(tuple(name for n in kind for name in self._table.groups[n]) for kind in self._kinds)

    def _tied_s(self, size: float, group: int, other: int) -> float:
        return min(self._table._tied_s(size, n, other) for n in self._kinds[group])

    def _hop(self, i: int, left_group: int, right_group: int) -> Hop | None:
        pairs = itertools.product(self._kinds[left_group], self._kinds[right_group])
        found = [hop for left, right in pairs if (hop := self._table.hop(i, left, right)) is not None]
        if not found:
            return None
        there, back = zip(*((hop.forward_busy, hop.backward_busy) for hop in found), strict=True)
        return Hop(
            min(hop.forward_s for hop in found), min(hop.backward_s for hop in found),
            (min(busy for busy, _ in there), min(busy for _, busy in there)),
            (min(busy for busy, _ in back), min(busy for _, busy in back)),
        )  # fmt: skip


def by_kinds(table: PriceTable) -> KindTable | None:
    """The relaxation; None: it takes no worker for another, or a hint gives the workers' order."""
    several = len(set(table.like)) < len(table.groups)
    return KindTable(table) if several and not table.problem.options.order else None
