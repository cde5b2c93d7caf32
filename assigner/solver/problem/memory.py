"""What fits on a worker, and what it must rematerialise for that: the one rule of all searches.

A worker that keeps `in_flight` micro-batches of what it holds fits if

    state + workspace + messages + in_flight * (values read + activations stored)
        + largest rematerialised activation  <=  capacity

(`CostModel.memory` is the simulator's word on it). Rematerialising a partition costs the time of its recompute, and
everything else about the step time is untouched: so of one stage the subset with the least added time is the best
whatever the other stages do. That is a small knapsack, solved by `least_remat`, and for many intervals at once as a
bound by `least_recompute_s`. Where all partitions take about as many seconds per byte it is a subset sum, which no
bound prunes: after `tuning.KNAPSACK_NODES` the best set so far is what plans have. Proofs go by a floor of its seconds,
`LeastRemat.floor_s`, and of what was priced by `LeastRemat.exactness`.

Where several workers share a stage (stage_remat.py), or a worker has several (set_memory.py), more than one sum of
seconds counts: there all sets are kept that no other one beats in all of these at once (`RematSets`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.cost import PartitionCost
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING, TIE
from assigner.solver.problem.options import RematRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.solver.limits.clock import SolveClock
    from assigner.solver.problem.arrays import Flags, Floats


@dataclass(frozen=True, slots=True)
class HeldPartitions:
    """Partitions on one worker, before it is decided what it rematerialises.

    Args:
        costs: Of each partition.
        rules: Which of them must never, or always, be rematerialised.
        room: Bytes for activations and values read, of all micro-batches in flight.
        read: Bytes of the values read by one micro-batch.
    """

    costs: tuple[PartitionCost, ...]
    rules: Sequence[RematRule | None]
    room: float
    read: float

    @classmethod
    def on(
        cls, capacity: float, costs: Sequence[PartitionCost], rules: Sequence[RematRule | None], *, state: float,
        read: float, messages: float,
    ) -> HeldPartitions:  # fmt: skip
        """On a worker of that capacity; bytes of state, of values read by a micro-batch, and of messages."""
        workspace = max(each.workspace_bytes for each in costs)
        return cls(tuple(costs), rules, capacity - state - messages - workspace, read)

    def deepest(self, again: tuple[int, ...], in_flight: int, most: int) -> int:
        """The most micro-batches, from `in_flight` to `most`, that fit with these rematerialised."""
        twice = set(again)
        kept = self.read + sum(each.activation_bytes for i, each in enumerate(self.costs) if i not in twice)
        room = self.room - max((self.costs[i].activation_bytes for i in again), default=0.0)
        return most if not kept or kept * most <= room else max(in_flight, min(most, int(room / kept)))


@dataclass(frozen=True, slots=True)
class LeastRemat:
    """What to rematerialise so that a worker fits.

    Args:
        positions: The partitions, by index.
        seconds: What that adds to a micro-batch.
        floor_s: What any choice that fits adds at least: the same where nothing adds less, else a lower bound.
    """

    positions: tuple[int, ...]
    seconds: float
    floor_s: float

    @property
    def exact(self) -> bool:
        """Whether nothing adds less."""
        return self.floor_s >= self.seconds

    def exactness(self, backward_s: float) -> float:
        """What share of the backward no choice is below, if it takes `backward_s` with nothing rematerialised.

        With all times of a plan so many times as long it takes exactly that, and with another choice no time is
        shorter: so many times its value is a bound for all choices.
        """
        return 1.0 if self.exact else (backward_s + self.floor_s) / (backward_s + self.seconds)


class RematSearch:
    """The knapsacks of one problem: once many were cut off they have fewer nodes, as then all are of that kind.

    Once the time is over they have none but to fill up in order: whoever asks ends soon.
    """

    def __init__(self) -> None:
        self._cut_off = 0

    def least(self, held: HeldPartitions, in_flight: int, clock: SolveClock) -> LeastRemat | None:
        """What to rematerialise with so many micro-batches in flight; None: that many do not fit; as `least_remat`."""
        nodes = tuning.KNAPSACK_NODES // (20 if self._cut_off >= tuning.KNAPSACKS_CUT else 1)
        found = least_remat(held, in_flight, 0 if clock.over else nodes)
        self._cut_off += found is not None and not found.exact
        return found


def least_remat(held: HeldPartitions, in_flight: int, nodes: int = tuning.KNAPSACK_NODES) -> LeastRemat | None:
    """What to rematerialise with so many micro-batches in flight: least seconds, then found first; None: nothing fits.

    The largest rematerialised activation is enumerated: for each value `top`, only partitions up to it take part, and
    what is left is a minimum knapsack. Branch and bound may take so many `nodes`; where it is cut off, a good choice is
    found with as many more.
    """
    activations = [each.activation_bytes for each in held.costs]
    recomputes = [each.recompute_s for each in held.costs]
    room = held.room - in_flight * held.read
    forced = [i for i, rule in enumerate(held.rules) if rule == "always"]
    base = max((activations[i] for i in forced), default=0.0)
    excess = in_flight * (sum(activations) - sum(activations[i] for i in forced)) - room
    must = sum(recomputes[i] for i in forced)
    if excess + base <= 0:
        return LeastRemat(tuple(forced), must, must)
    free = [i for i, size in enumerate(activations) if size > 0 and held.rules[i] is None]
    ranked = sorted(free, key=lambda i: (recomputes[i] / activations[i], i))
    best = _Cheapest()
    sizes = sorted({activations[i] for i in ranked}, reverse=True)
    cut_off, left = [], nodes
    for n, top in enumerate(sizes):
        items = [i for i in ranked if activations[i] <= top]
        need = (excess + max(top, base)) / in_flight
        if sum(activations[i] for i in items) < need:
            break  # a smaller top loses more activations than it gains room
        knapsack = _Knapsack(items, activations, recomputes, need)
        if len(sizes) - n <= tuning.COUNTED_SIZES:
            knapsack.count(best)
        elif not (left := knapsack.search(best, left)):
            cut_off.append(knapsack)
        if top <= base:
            break  # below, only choice is lost
    floor = _most_promising(cut_off, best, nodes)
    if best.chosen is None:
        return None
    positions = tuple(sorted([*forced, *best.chosen]))
    seconds = sum(recomputes[i] for i in positions)
    least = must + floor if cut_off else seconds
    return LeastRemat(positions, seconds, least if least < seconds * (1 - TIE) else seconds)


def _most_promising(knapsacks: Sequence[_Knapsack], best: _Cheapest, nodes: int) -> float:
    """Improve `best` until it is near what none is below, the knapsack with the least bound first; returns that."""
    floor = math.inf
    queue = [(each.bound(0, each.need), n) for n, each in enumerate(knapsacks)]
    heapq.heapify(queue)
    while queue:
        least, n = heapq.heappop(queue)
        knapsack = knapsacks[n]
        if knapsack.least > least and queue and knapsack.least > queue[0][0]:  # that takes longer to know
            heapq.heappush(queue, (knapsack.least, n))
            continue
        least = knapsack.least
        if least < best.cost * (1 - tuning.KNAPSACK_NEAR):
            enough = len(knapsack.items) + 2  # to fill up in order
            nodes = knapsack.search(best, max(nodes, enough), tuning.KNAPSACK_NEAR)
            if nodes > 0:
                floor = min(floor, max(least, best.cost * (1 - tuning.KNAPSACK_NEAR)))
                continue
        return min(floor, least, best.cost)
    return min(floor, best.cost)


@dataclass(slots=True)
class _Cheapest:
    """The best choice so far of all knapsacks of one question, and what it takes."""

    cost: float = math.inf
    chosen: tuple[int, ...] | None = None

    def take(self, cost: float, chosen: tuple[int, ...]) -> None:
        """Take another where it is cheaper."""
        if cost < self.cost:
            self.cost, self.chosen = cost, chosen


class _Knapsack:
    """Items, ordered by seconds per byte, whose activations must add up to `need` bytes, as cheap as can be."""

    def __init__(self, items: Sequence[int], sizes: Sequence[float], recomputes: Sequence[float], need: float) -> None:
        self.items, self.need = items, need
        self._sizes, self._recomputes = sizes, recomputes

    @cached_property
    def _size_up_to(self) -> list[float]:
        return list(itertools.accumulate((self._sizes[i] for i in self.items), initial=0.0))

    @cached_property
    def _cost_up_to(self) -> list[float]:
        return list(itertools.accumulate((self._recomputes[i] for i in self.items), initial=0.0))

    def count(self, best: _Cheapest) -> None:
        """Improve `best` where there are few sizes: of each the cheapest few, of the last, what is still missing."""
        sizes = sorted({self._sizes[i] for i in self.items}, reverse=True)
        groups = sorted(([i for i in self.items if self._sizes[i] == size] for size in sizes), key=len)
        self._count(groups, self.need, (), 0.0, best)

    def _count(
        self, groups: Sequence[Sequence[int]], need: float, taken: tuple[int, ...], cost: float, best: _Cheapest
    ) -> None:
        """Likewise with what was `taken` of earlier sizes, at this cost, so that `need` bytes are left."""
        group, *rest = groups
        size = self._sizes[group[0]]
        if not rest:
            least = max(0, math.ceil(need / size))
            if least <= len(group):
                best.take(cost + sum(self._recomputes[i] for i in group[:least]), (*taken, *group[:least]))
            return
        for number in range(len(group) + 1):
            if cost >= best.cost:
                return
            self._count(rest, need - number * size, (*taken, *group[:number]), cost, best)
            if number * size >= need or number == len(group):
                return
            cost += self._recomputes[group[number]]

    @cached_property
    def least(self) -> float:
        """No choice takes fewer seconds: by bytes as `bound` has it, and by number, as many items as it takes at least.

        Where items are of about one size no part of one can be taken: that many are what the largest need, and they
        take no less than the cheapest.
        """
        freed = itertools.accumulate(sorted((self._sizes[i] for i in self.items), reverse=True))
        short = sum(1 for _ in itertools.takewhile(lambda each: each < self.need * (1 - ROUNDING), freed))
        cheapest = sorted(self._recomputes[i] for i in self.items)[: short + 1]
        return max(self.bound(0, self.need), sum(cheapest))

    def bound(self, at: int, missing: float) -> float:
        """Least seconds for so many bytes of the items from `at` on: in their order, the last one in part."""
        size_up_to, cost_up_to = self._size_up_to, self._cost_up_to
        filled = bisect_left(size_up_to, size_up_to[at] + missing, lo=at)
        if filled > len(self.items):
            return math.inf
        i = self.items[filled - 1]
        over = (size_up_to[filled] - size_up_to[at] - missing) / self._sizes[i]
        return cost_up_to[filled] - cost_up_to[at] - over * self._recomputes[i]

    def search(self, best: _Cheapest, nodes: int, near: float = TIE) -> int:
        """Improve `best` by depth-first branch and bound; returns how many of the `nodes` are left, 0: it was cut off.

        What can be better only by a share of less than `near` is left out.

        Of equal activations the cheaper is taken first: once one is left out, so are its equals that follow.
        """
        if nodes > 1 and self.least >= best.cost * (1 - near):
            return nodes
        stack = [(0, self.need, 0.0, frozenset[float](), tuple[int, ...]())]
        while stack:
            if nodes <= 1:
                return 0
            nodes -= 1
            at, missing, cost, left_out, chosen = stack.pop()
            if missing <= 0:
                best.take(cost, chosen)
                continue
            if at == len(self.items) or cost + self.bound(at, missing) >= best.cost * (1 - near):
                continue
            i = self.items[at]
            size = self._sizes[i]
            stack.append((at + 1, missing, cost, left_out | {size}, chosen))
            if size not in left_out:
                stack.append((at + 1, missing - size, cost + self._recomputes[i], left_out, (*chosen, i)))
        return nodes


class RematSets:
    """The sets of partitions that workers may rematerialise together, where more than one sum of seconds counts.

    Arrays of sets are [set, position].

    Args:
        held: What each worker holds: the same partitions, under the same rules.
        in_flight: Micro-batches that each of them keeps at once.
        seconds: Of recomputing each position, as each sum has them: [sum, position].
    """

    def __init__(self, held: Sequence[HeldPartitions], in_flight: Sequence[int], seconds: Floats) -> None:
        self._bytes = np.array([[cost.activation_bytes for cost in each.costs] for each in held])
        self._in_flight, self._seconds, self._rules = in_flight, seconds, held[0].rules
        self._room = [each.room - deep * each.read for each, deep in zip(held, in_flight, strict=True)]

    @cached_property
    def alike(self) -> list[list[int]]:
        """Positions that may be rematerialised, those together that only their place tells apart."""
        kinds: dict[tuple[float, ...], list[int]] = {}
        for i, rule in enumerate(self._rules):
            if rule is None and self._bytes[:, i].any():
                kinds.setdefault((*self._bytes[:, i], *self._seconds[:, i]), []).append(i)
        return list(kinds.values())

    def every(self) -> Flags:
        """Every set for which all workers have room, but that of positions that are alike it has the first few."""
        counts = np.indices([len(kind) + 1 for kind in self.alike]).reshape(len(self.alike), -1)
        found = np.tile(np.array([rule == "always" for rule in self._rules]), (counts.shape[1], 1))
        for count, kind in zip(counts, self.alike, strict=True):
            for rank, i in enumerate(kind):
                found[:, i] = count > rank
        return found[self.fit(found)]

    def fit(self, sets: Flags) -> Flags:
        """Whether every worker has room, by set."""
        found = np.ones(len(sets), dtype=bool)
        for row, deep, most in zip(self._bytes, self._in_flight, self._room, strict=True):
            found &= deep * (~sets @ row) + np.where(sets, row, 0.0).max(axis=1, initial=0.0) <= most
        return found

    def undominated(self, sets: Flags) -> Flags:
        """Those than which no other is as good in all sums, the least of them first."""
        left = sets[np.argsort((sets @ self._seconds.T).sum(axis=1), kind="stable")]
        sums, kept = left @ self._seconds.T, []
        while len(left):
            kept.append(left[0])
            better = (sums < sums[0]).any(axis=1)
            left, sums = left[better], sums[better]
        return np.array(kept, dtype=bool).reshape(-1, sets.shape[1])


_TOO_MANY = 1e100
"""More bytes than there are, to which prices of a byte of any profile can be multiplied."""


def least_recompute_s(
    costs: tuple[Floats, Floats], rules: Sequence[RematRule | None], room: Floats, in_flight: int, *,
    sums: Callable[[Floats], Floats], largest: Callable[[Floats], Floats],
) -> tuple[Floats, Flags]:  # fmt: skip
    """The knapsack of many intervals at once: least seconds of recomputing, as a lower bound, and where it is exact.

    Source: Lagrangian dual of the knapsack. For any price p of a byte, rematerialising partitions of sizes a and times
    f so that `need` bytes are freed takes at least p need - sum of max(0, p a - f).

    Args:
        costs: Of each position the seconds of its recompute and the bytes that it keeps per micro-batch.
        rules: Per position "never" or "always" where there is no choice.
        room: Bytes for activations of each interval: [first, length - 1].
        in_flight: Micro-batches kept at once.
        sums: From values by position to their sum over each interval.
        largest: From values by position to the largest of each interval.

    Returns:
        Seconds, inf where there is no way to fit, and flags: both as `room`.
    """
    r, a = costs
    forced = np.array([rule == "always" for rule in rules])
    free = np.array([rule is None for rule in rules]) & (a > 0)
    base = largest(np.where(forced, a, 0.0))
    must = sums(np.where(forced, r, 0.0))
    excess = in_flight * sums(np.where(forced, 0.0, a)) - room
    fits = excess + base <= 0
    smallest = a[free].min() if free.any() else 0.0
    need = np.where(fits, 0.0, np.minimum(excess + np.maximum(base, smallest), _TOO_MANY) / in_flight)
    there = sums(np.where(free, a, 0.0))
    never = ~fits & (there < need * (1 - ROUNDING))
    bound = np.zeros_like(room)
    for price in _byte_prices(r[free], a[free]):
        gain = np.where(free, np.maximum(0.0, price * a - r), 0.0)
        bound = np.maximum(bound, price * need - sums(gain))
    most, least = largest(np.where(free, a, 0.0)), -largest(np.where(free, -r, -np.inf))
    count = np.ceil(need / np.maximum(most, 1 / _TOO_MANY) * (1 - ROUNDING))
    bound = np.maximum(bound, np.where(fits | never, 0.0, count * np.where(np.isfinite(least), least, 0.0)))
    return np.where(np.isfinite(room) & ~never, must + np.where(fits, 0.0, bound), np.inf), fits | never


def _byte_prices(r: Floats, a: Floats) -> Floats:
    """Prices of a byte to try: ratios of time to size, the lowest and the highest among them."""
    ratios = np.unique(r / np.maximum(a, 1 / _TOO_MANY))
    if len(ratios) <= tuning.BYTE_PRICES:
        return ratios
    some: Floats = ratios[np.unique(np.linspace(0, len(ratios) - 1, tuning.BYTE_PRICES).astype(int))]
    return some
