"""Stages that several workers share: who may share one, how many micro-batches each takes, what that costs at least.

A worker r that takes t(r, k) seconds for k micro-batches of a stage carries, within a threshold T, as many as it can
end by then. So workers R carry the stage within T exactly if

    sum over r in R of  max { k : t(r, k) <= T }  >=  M

and the least such T, with the shares that reach it, is found by giving one micro-batch after the other to the worker
that ends it first. Memory is part of t: what k micro-batches in flight force a worker to recompute costs time, and more
than fit cost infinitely much.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver import tuning
from assigner.solver.prices import Hop, StageOption, StageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from assigner.solver.prices import PriceTable

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


def least_shares(seconds: Sequence[Floats], *, each: int = 0) -> tuple[Ints, Floats]:
    """Shares of M micro-batches that make the busiest worker's time least, of many stages at once.

    Args:
        seconds: Of each worker what k = 0 .. M micro-batches take, never less for more: [k, stage]; inf: too many.
        each: No worker gets fewer; so many for all of them are no more than M.

    Returns:
        Micro-batches of each worker, [worker, stage], the first of equals first; and the busiest worker's seconds, inf
        where they cannot carry the stage.
    """
    times = np.stack(seconds)
    workers, more, stages = times.shape
    shares, stage = np.full((workers, stages), each), np.arange(stages)
    busiest, following = times[:, each].max(axis=0), times[:, each + 1].copy()
    for _ in range(more - 1 - each * workers):
        chosen = following.argmin(axis=0)
        busiest = np.maximum(busiest, following[chosen, stage])
        shares[chosen, stage] += 1
        taken = shares[chosen, stage]
        following[chosen, stage] = np.where(
            taken < more - 1, times[chosen, np.minimum(taken + 1, more - 1), stage], np.inf
        )
    return shares, busiest


def replica_sets(sizes: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Every choice of two or more workers, up to likeness, as groups in rising order: few workers first.

    Args:
        sizes: Workers of each group of like ones.
        most: Workers that share a stage, at most.
    """
    return [
        tuple(group for group, taken in enumerate(count) for _ in range(taken))
        for number in range(2, min(most, sum(sizes)) + 1)
        for count in counts_of(sizes, number)
    ]


def counts_of(sizes: Sequence[int], number: int) -> Iterator[tuple[int, ...]]:
    """Every way to take `number` from groups of these sizes."""
    if not sizes:
        yield from [()] if number == 0 else []
        return
    for taken in range(max(0, number - sum(sizes[1:])), min(sizes[0], number) + 1):
        yield from ((taken, *rest) for rest in counts_of(sizes[1:], number - taken))


class ReplicaOptions(StageOptions):
    """The stage options of one schedule where workers may share a stage: those of one worker each, and of more.

    What is told of a shared stage holds for any shares on the set, and any number of micro-batches in flight: it is for
    bounds. Of times the fastest worker's count, of recomputing what each worker alone needs at least.

    Args:
        table: Prices.
        deep: As of `StageOptions`.
    """

    only_shared = True

    def __init__(self, table: PriceTable, *, deep: bool) -> None:
        super().__init__(table, deep=deep)
        self._alone, self._each = (table.one_f_one_b if deep else table.gpipe), table.one_f_one_b
        self._between = cache(self._hop)

    @cached_property
    def sets(self) -> Sequence[tuple[int, ...]]:
        """As of `StageOptions`; all there are if those are few, else none with several workers."""
        most = min(self._table.problem.most_replicas, self._table.micro_batches)
        sizes = [len(group) for group in self._table.groups]
        alone = list(super().sets)
        every = math.prod(size + 1 for size in sizes)
        return alone + (replica_sets(sizes, most) if every <= tuning.MOST_SETS else [])

    def count(self) -> int:
        """About how many options there are."""
        return len(self._table.problem.order) ** 2 // 2 * len(self.sets)

    def hop(self, i: int, left: int, right: int) -> Hop | None:
        """As of `StageOptions`: the fastest way between any two of their workers."""
        found: Hop | None = self._between(i, left, right)
        return found

    def _hop(self, i: int, left: int, right: int) -> Hop | None:
        table, alone = self._table, len(self._table.groups)
        if left < alone and right < alone:
            return table.hop(i, left, right)
        pairs = list(itertools.product(self.sets[left], self.sets[right]))
        ends = [(table.groups[one][0], table.groups[other][-1]) for one, other in pairs]
        if not all(table.problem.follows(one, other) for one, other in ends):
            return None
        hops = {pair: hop for pair in pairs if (hop := table.hop(i, *pair)) is not None}
        if {one for one, _ in hops} != {*self.sets[left]} or {other for _, other in hops} != {*self.sets[right]}:
            return None  # one of them has a micro-batch that nobody else can take over
        there, back = min(hop.forward_s for hop in hops.values()), min(hop.backward_s for hop in hops.values())
        return Hop(there, back, share=1 / sum(pair in hops for pair in pairs))

    @cached_property
    def all(self) -> tuple[StageOption, ...]:
        """Every option."""
        alone = len(self._table.groups)
        return self._alone.all + tuple(
            option for number in range(alone, len(self.sets)) for option in self._shared(number, self._segments)
        )

    @cached_property
    def _segments(self) -> list[tuple[int, int]]:
        """(first, last) of every stage that fits on some worker with one micro-batch in flight."""
        return sorted({(option.first, option.last) for option in self._each.all})

    def find(self, first: int, last: int, group: int, stages: int = 1) -> StageOption | None:
        """As of `StageOptions`, for a set of any number of workers."""
        if group < len(self._table.groups):
            return self._alone.find(first, last, group, stages)
        return next(iter(self._shared(group, [(first, last)])), None)

    def _shared(self, number: int, segments: Sequence[tuple[int, int]]) -> list[StageOption]:
        table, members = self._table, self.sets[number]
        levels = {group: [self._each.levels(*segment, group) for segment in segments] for group in members}
        whole = [n for n in range(len(segments)) if all(levels[group][n] for group in members)]
        if not whole:
            return []
        seconds = {group: self._seconds([levels[group][n] for n in whole]) for group in levels}
        shares, busiest = least_shares([seconds[group] for group in members], each=1)
        choices, found = self._members(number), []
        for column, n in enumerate(whole):
            if math.isinf(busiest[column]):
                continue
            first, last = segments[n]
            least = [levels[group][n][0] for group in members]
            reduce_s = min((table.problem.reduce_s(first, last, names) for names in choices), default=0.0)
            if math.isinf(reduce_s):
                continue
            again = {i for group, k in zip(members, shares[:, column], strict=True) for i in
                     self._level(levels[group][n], int(k)).rematerialise}  # fmt: skip
            found.append(
                StageOption(
                    first, last, number, min(each.forward_s for each in least), min(each.backward_s for each in least),
                    reduce_s + self._update_s(first, last, members), tuple(sorted(again)), 1, table.micro_batches,
                    table.micro_batches, tuple(shares[:, column].tolist()), float(busiest[column]),
                )
            )  # fmt: skip
        return found

    def _members(self, number: int) -> Sequence[tuple[str, ...]]:
        """The workers that a set may mean; empty: there are too many to look at.

        Of like workers it may be any, and together with others the way round them may differ.
        """
        members, groups = self.sets[number], self._table.groups
        alike = dict.fromkeys(members)
        if len(alike) == 1:
            return [groups[members[0]][: len(members)]]
        if math.prod(math.comb(len(groups[group]), members.count(group)) for group in alike) > tuning.MOST_SETS:
            return []
        each = [itertools.combinations(groups[group], members.count(group)) for group in alike]
        return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*each)]

    def _update_s(self, first: int, last: int, members: Sequence[int]) -> float:
        """Seconds of the longest update; a shared parameter's way to other stages is left out."""
        rows = [self._table.rows[group][first : last + 1] for group in members]
        return max(sum(each.update_s for each in row if each is not None) for row in rows)

    def _seconds(self, levels: Sequence[Sequence[StageOption]]) -> Floats:
        """Seconds of 0 .. M micro-batches of each stage on one worker: [k, stage]."""
        most = self._table.micro_batches
        counts = np.arange(most + 1)
        if self._deep:  # how many of them are in flight is a choice, and one may be enough
            once: Floats = np.array([each[0].forward_s + each[0].backward_s for each in levels])
            return np.outer(counts, once)
        found = np.full((most + 1, len(levels)), np.inf)
        for n, options in enumerate(levels):
            for option in options:
                held = slice(option.least, option.promised + 1)
                found[held, n] = counts[held] * (option.forward_s + option.backward_s)
        found[0] = 0.0
        return found

    def _level(self, levels: Sequence[StageOption], share: int) -> StageOption:
        """The option of one worker that has so many micro-batches of a stage."""
        in_flight = 1 if self._deep else max(1, share)
        return next((each for each in levels if in_flight <= each.promised), levels[-1])
