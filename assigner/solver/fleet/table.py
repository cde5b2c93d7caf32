"""Segments as arrays: what a stage of any kind of worker, start and length takes, for chains of any size.

Where a segment must rematerialise, its backward is a lower bound at first: the knapsack of remat.py relaxed to
fractions. `settle` replaces bounds by the exact values; what is at least as large as both can be left as it is.

Source of the bound: Lagrangian dual of the knapsack. For any price p of a byte, rematerialising partitions of sizes a
and times f so that `need` bytes are freed takes at least p need - sum of max(0, p a - f).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.remat import least_remat
from assigner.solver.segments import Column, SegmentSizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.cost import PartitionCost
    from assigner.solver.instance import Instance

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

PRICES = 24
"""So many prices of a byte are tried; with no more ratios of time to size the bound is the best of its kind."""

_FIELDS = ("forward_s", "backward_s", "update_s", "activation_bytes", "workspace_bytes", "recompute_s")
_ROUNDING = 1e-9
"""Share of a worker's memory that sums taken in another order may differ by: bounds grant it."""


@dataclass(frozen=True)
class Kind:
    """Groups of workers that a bound takes for one.

    Args:
        groups: Their numbers in the instance.
        count: How many workers they have.
    """

    groups: tuple[int, ...]
    count: int


def kinds_of(instance: Instance) -> tuple[Kind, ...]:
    """Groups whose workers have the same kind, thread count and capacity."""
    worker = instance.problem.profile.worker
    found: dict[tuple[str, int, float], list[int]] = {}
    for number, group in enumerate(instance.groups):
        first = worker[group[0]]
        found.setdefault((first.kind, first.threads, first.tensor_bytes), []).append(number)
    return tuple(
        Kind(tuple(numbers), sum(len(instance.groups[number]) for number in numbers)) for numbers in found.values()
    )


class SegmentTable:
    """Seconds of every segment up to some length: arrays [kind, first, length - 1], inf where there is none.

    Args:
        instance: What is to be placed.
        kinds: Workers that count as alike; each segment has the least of their prices.
        longest: Partitions in the longest segment.

    Attributes:
        like: For each group the first one with the same prices and capacity.
        forward, backward, update: Seconds as of `Column`; backward may be a lower bound.
        settled: Where backward is exact.
    """

    def __init__(self, instance: Instance, kinds: Sequence[Kind], longest: int) -> None:
        self.instance, self.kinds, self.longest = instance, tuple(kinds), longest
        self._sizes = SegmentSizes(instance.problem, instance.size)
        chain = instance.problem.profile.is_chain
        self._ones = [next(self._sizes.grown_from(i)) for i in range(len(instance.problem.order))] if chain else None
        self._bytes = self._segment_bytes()
        self.like = self._likes()
        self._columns: dict[tuple[int, int, int], Column | None] = {}
        rows = [self._kind(kind) for kind in self.kinds]
        self.forward, self.backward, self.update = (np.stack([row[n] for row in rows]) for n in range(3))
        self.settled: Flags = np.stack([row[3] for row in rows])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(kinds, positions, lengths)."""
        return len(self.kinds), len(self.instance.problem.order), self.longest

    def _window(self, values: Floats) -> Floats:
        """Sums of each segment."""
        n = len(values)
        sums = np.concatenate([[0.0], np.cumsum(values)])
        ends = np.minimum(np.arange(n)[:, None] + 1 + np.arange(self.longest)[None, :], n)
        within: Floats = sums[ends] - sums[:n, None]
        return within

    def _running_max(self, values: Floats) -> Floats:
        """Largest of each segment."""
        n = len(values)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest)[None, :], n - 1)
        largest: Floats = np.maximum.accumulate(values[ends], axis=1)
        return largest

    def anywhere(self, flags: Sequence[bool]) -> Flags:
        """Whether any partition of a segment has the flag: [first, length - 1]."""
        return self._window(np.array(flags, dtype=float)) > 0

    def _segment_bytes(self) -> tuple[Floats, Floats, Floats]:
        """(state, values read, messages) of each segment; inf where it would leave the chain or may not be."""
        problem, n = self.instance.problem, len(self.instance.problem.order)
        if self._ones is not None:
            ones = np.array(self._ones)
            state, read = self._window(ones[:, 0]), self._window(ones[:, 1])
            ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest)[None, :], n - 1)
            messages = ones[ends, 2]
        else:
            grown = np.full((3, n, self.longest), np.inf)
            for i in range(n):
                some = list(itertools.islice(self._sizes.grown_from(i), self.longest))
                grown[:, i, : len(some)] = np.array(some).T
            state, read, messages = grown
        first, last = np.arange(n)[:, None], np.arange(n)[:, None] + np.arange(self.longest)[None, :]
        open_at, apart = np.array(problem.may_cut), np.array(problem.apart, dtype=float)
        may = (last < n) & open_at[first] & open_at[np.minimum(last + 1, n)] & (self._running_max(apart) < first)
        return np.where(may, state, np.inf), read, messages

    def _likes(self) -> list[int]:
        """For each group the first one with the same prices and capacity."""
        first: dict[object, int] = {}
        number_of: dict[int, int] = {}
        numbers: dict[object, int] = {}
        likes = []
        for group, prices in enumerate(self.instance.prices):
            if id(prices) not in number_of:
                number_of[id(prices)] = numbers.setdefault(prices, len(numbers))
            likes.append(first.setdefault((number_of[id(prices)], self._capacity(group)), group))
        return likes

    def _kind(self, kind: Kind) -> tuple[Floats, Floats, Floats, Flags]:
        """The least of the prices of a kind's groups."""
        rows = [
            self._group(self.instance.prices[group], self._capacity(group))
            for group in sorted({self.like[group] for group in kind.groups})
        ]
        forward, backward, update, settled = (list(each) for each in zip(*rows, strict=True))
        return (
            np.minimum.reduce(forward), np.minimum.reduce(backward), np.minimum.reduce(update),
            np.logical_and.reduce(settled),
        )  # fmt: skip

    def _capacity(self, group: int) -> float:
        return self.instance.problem.profile.worker[self.instance.groups[group][0]].tensor_bytes

    def _group(self, prices: Sequence[PartitionCost | None], capacity: float) -> tuple[Floats, Floats, Floats, Flags]:
        """Prices of each segment on the workers of one group."""
        none = np.array([price is None for price in prices], dtype=float)
        f, b, u, a, w, r = (
            np.array([0.0 if price is None else getattr(price, name) for price in prices]) for name in _FIELDS
        )
        state, read, messages = self._bytes
        fixed = state + self.instance.micro_batches * read + self._running_max(w) + messages
        room = capacity * (1 + _ROUNDING) - fixed
        again, settled = self._again(r, a, room)
        missing = (self._window(none) > 0) | ~np.isfinite(again)
        forward = np.where(missing, np.inf, self._window(f))
        backward = np.where(missing, np.inf, self._window(b) + np.where(missing, 0.0, again))
        return forward, backward, np.where(missing, np.inf, self._window(u)), settled | missing

    def _again(self, r: Floats, a: Floats, room: Floats) -> tuple[Floats, Flags]:
        """Least seconds of recomputing, as a lower bound, and where that is exact; inf: no way to fit."""
        rules = self.instance.problem.remat_rules
        forced = np.array([rule == "always" for rule in rules])
        free = np.array([rule is None for rule in rules]) & (a > 0)
        in_flight = self.instance.micro_batches
        base = self._running_max(np.where(forced, a, 0.0))
        must = self._window(np.where(forced, r, 0.0))
        excess = in_flight * self._window(np.where(forced, 0.0, a)) - room
        fits = excess + base <= 0
        smallest = a[free].min() if free.any() else 0.0
        need = np.where(fits, 0.0, np.minimum(excess + np.maximum(base, smallest), 1e300) / in_flight)
        there = self._window(np.where(free, a, 0.0))
        never = ~fits & (there < need * (1 - _ROUNDING))
        bound = np.zeros_like(room)
        for price in _byte_prices(r[free], a[free]):
            gain = np.where(free, np.maximum(0.0, price * a - r), 0.0)
            bound = np.maximum(bound, price * need - self._window(gain))
        return np.where(np.isfinite(room) & ~never, must + np.where(fits, 0.0, bound), np.inf), fits | never

    def column(self, first: int, last: int, group: int) -> Column | None:
        """One segment on a worker of one group, priced exactly; None: it does not fit."""
        key = first, last, self.like[group]
        if key not in self._columns:
            self._columns[key] = self._price(*key)
        found = self._columns[key]
        return found if found is None or found.group == group else replace(found, group=group)

    def _price(self, first: int, last: int, group: int) -> Column | None:
        problem = self.instance.problem
        held = self.instance.prices[group][first : last + 1]
        if any(price is None for price in held) or not problem.may_cut[first] or not problem.may_cut[last + 1]:
            return None
        if max(problem.apart[first : last + 1]) >= first:
            return None
        state, read, messages = self._exact_bytes(first, last)
        room = self._capacity(group) - state - self.instance.micro_batches * read - messages
        room -= max(price.workspace_bytes for price in held if price)
        if room < 0:
            return None
        again = least_remat(
            [price.activation_bytes for price in held if price], [price.recompute_s for price in held if price],
            in_flight=self.instance.micro_batches, room=room, rules=problem.remat_rules[first : last + 1],
        )  # fmt: skip
        if again is None:
            return None
        forward, backward, update = (
            sum(getattr(price, name) for price in held) for name in ("forward_s", "backward_s", "update_s")
        )
        repeated = sum(price.recompute_s for i in again if (price := held[i]))
        return Column(first, last, group, forward, backward + repeated, update, tuple(first + i for i in again))

    def _exact_bytes(self, first: int, last: int) -> tuple[float, float, float]:
        if self._ones is not None:
            held = self._ones[first : last + 1]
            return sum(state for state, _, _ in held), sum(read for _, read, _ in held), held[-1][2]
        return next(itertools.islice(self._sizes.grown_from(first), last - first, None))

    def settle(self, kind: int, first: int, length: int) -> float:
        """Replace a lower bound by the exact value, and return it, in seconds."""
        if not self.settled[kind, first, length - 1]:
            groups = sorted({self.like[group] for group in self.kinds[kind].groups})
            found = [self.column(first, first + length - 1, group) for group in groups]
            exact = min((column.backward_s for column in found if column is not None), default=math.inf)
            self.backward[kind, first, length - 1] = exact
            self.settled[kind, first, length - 1] = True
        return float(self.backward[kind, first, length - 1])


def _byte_prices(r: Floats, a: Floats) -> Floats:
    """Prices of a byte to try: ratios of time to size, the lowest and the highest among them."""
    ratios = np.unique(r / a)
    if len(ratios) <= PRICES:
        return ratios
    some: Floats = ratios[np.unique(np.linspace(0, len(ratios) - 1, PRICES).astype(int))]
    return some
