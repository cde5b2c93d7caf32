"""Stages that several workers share: who may share one, how many micro-batches each takes, what that costs at least.

A worker r that takes t(r, k) seconds for k micro-batches of a stage carries, within a threshold T, as many as it can
end by then. So workers R carry the stage within T exactly if

    sum over r in R of  max { k : t(r, k) <= T }  >=  M

and the least such T, with the shares that reach it, is found by giving one micro-batch after the other to the worker
that ends it first: the M that end first of all that any worker could have. Memory is part of t: what k micro-batches in
flight force a worker to recompute costs time, and more than fit cost infinitely much.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.limits import tuning
from assigner.solver.problem.interval_prices import Hop
from assigner.solver.problem.stage_options import StageOption, StageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.solver.problem.arrays import Floats, Ints
    from assigner.solver.problem.interval_prices import IntervalPrices


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
    longest, left = more - 1 - each, more - 1 - each * workers
    ends = times[:, each + 1 :].reshape(workers * longest, stages)
    given = np.argsort(ends, axis=0, kind="stable")[:left]  # in their order: each to who ends it first
    shares = each + (given // longest == np.arange(workers)[:, None, None]).sum(axis=1)
    busiest = times[:, each].max(axis=0)
    if left:
        busiest = np.maximum(busiest, np.take_along_axis(ends, given[-1:], axis=0)[0])
    return shares, busiest


def replica_sets(sizes: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Every choice of two to `most` workers from groups of these sizes, as groups in rising order: few first."""
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
    bounds. Of times the fastest worker's count, of recomputing what each worker alone needs at least. What all of them
    rematerialise is no part of it: it goes by the shares and the micro-batches in flight (stage_remat.py).

    Shared stages whose value by themselves is `below()` seconds or more are left out of `all`; that is asked for once,
    when they are first looked at, and then is `below_s`.
    """

    only_shared = True

    def __init__(self, table: IntervalPrices, *, deep: bool, below: Callable[[], float]) -> None:
        super().__init__(table, deep=deep)
        self._each, self._below, self.below_s = table.one_f_one_b, below, math.inf
        single = table.one_f_one_b if deep else table.gpipe
        self._alone = single if single.count() <= tuning.FULL_OPTIONS else StageOptions(table, deep=deep, relaxed=True)
        self._between = cache(self._ways)
        self._on = cache(self._held_by)

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(group) for group in self.table.groups]

    @property
    def _most(self) -> int:
        return min(self.table.problem.most_replicas, self.table.micro_batches)

    @property
    def whole(self) -> bool:
        """Whether every set of workers is looked at that may share a stage."""
        return self.few and math.prod(size + 1 for size in self._sizes) <= tuning.MOST_SETS

    @property
    def few(self) -> bool:
        """Whether there are few enough stages of one worker to look at shared ones, too."""
        return self._alone.count() <= tuning.COARSE_OPTIONS

    @cached_property
    def sets(self) -> Sequence[tuple[int, ...]]:
        """As of `StageOptions`, and those of several workers that have a stage below `below`."""
        return [*super().sets, *self._by_set]

    @cached_property
    def _by_set(self) -> dict[tuple[int, ...], list[StageOption]]:
        """The shared stages below `below` by who shares them; of sets of workers that have any.

        Of all sets if those are few, else of like workers, those of a host, and the fastest.

        Raises:
            OutOfTime: the time is over.
        """
        self.below_s, number = self._below(), len(self.table.groups)
        if not self.few:
            return {}
        among = replica_sets(self._sizes, self._most) if self.whole else self._natural()
        found: dict[tuple[int, ...], list[StageOption]] = {}
        for members in among:
            if 2 <= len(members) <= self._most:
                options = self._shared(members, number + len(found), range(len(self._intervals)), self.below_s)
                if options:
                    found[members] = options
        self._on.cache_clear()  # all candidates are there at once, and each has a table of every interval
        return found

    def _natural(self) -> list[tuple[int, ...]]:
        """Workers that go together by what they are: of one group or kind, of one host, the fastest of all."""
        table = self.table
        hosts: dict[str, list[int]] = {}
        for number, names in enumerate(table.groups):
            for name in names:
                hosts.setdefault(table.problem.profile.worker[name].host, []).append(number)
        speed = [sum(each.forward_s + each.backward_s for each in row if each is not None) for row in table.rows]
        fastest = [n for n in sorted(range(len(speed)), key=speed.__getitem__) for _ in table.groups[n]]
        kinds = [[n for n in kind for _ in table.groups[n]] for kind in table.kinds]
        rows = [[n] * size for n, size in enumerate(self._sizes)]
        found = [row[:number] for row in (*rows, *kinds, *hosts.values()) for number in range(2, min(len(row), 8) + 1)]
        found += [*kinds, *hosts.values()]
        found += [fastest[: 2**k] for k in range(1, len(fastest).bit_length())] + [fastest]
        return list(dict.fromkeys(tuple(sorted(each)) for each in found))[: tuning.MOST_SETS]

    def count(self) -> int:
        """How many options there are; about, where they are not looked at."""
        return len(self.all) if self.few else self._alone.count()

    def hop(self, i: int, left: int, right: int) -> Hop | None:
        """As of `StageOptions`: the fastest way between any two of their workers."""
        alone = len(self.table.groups)
        if left < alone and right < alone:
            return self.table.hop(i, left, right)
        there, back, ways = self._between(i)
        if not ways[left, right]:
            return None
        return Hop(float(there[left, right]), float(back[left, right]), share=1 / int(ways[left, right]))

    def _ways(self, i: int) -> tuple[Floats, Floats, Ints]:
        """Of boundary i between any two sets: least seconds forward and backward, and how many links carry it.

        None carries it where a worker of one has no way to the other: it has a micro-batch that nobody else takes over.
        """
        table, groups = self.table, range(len(self.table.groups))
        uses = np.array([[members.count(group) for group in groups] for members in self.sets])
        hops = [[table.hop(i, one, other) for other in groups] for one in groups]
        met = np.array([[hop is not None for hop in row] for row in hops])
        ends = [(members[0], members[-1]) for members in table.groups]
        follows = np.array([[table.problem.follows(one, other) for _, other in ends] for one, _ in ends])
        held = uses > 0
        lacks = held @ (held @ met.T == 0).T.astype(int) + (held @ (held @ met == 0).T.astype(int)).T
        ways: Ints = np.where((lacks == 0) & (held @ ~follows @ held.T == 0), uses @ met.astype(int) @ uses.T, 0)
        there, back = np.full((2, len(uses), len(uses)), np.inf)
        for one, other in itertools.product(groups, groups):
            hop, both = hops[one][other], np.ix_(held[:, one], held[:, other])
            if hop is not None:
                there[both] = np.minimum(there[both], hop.forward_s)
                back[both] = np.minimum(back[both], hop.backward_s)
        return there, back, ways

    @cached_property
    def all(self) -> tuple[StageOption, ...]:
        """Every option, but for shared ones that can be in no plan below `below`."""
        return (*self._alone.all, *itertools.chain.from_iterable(self._by_set.values()))

    @cached_property
    def _intervals(self) -> list[tuple[int, int]]:
        """(first, last) of every stage that may be shared and fits on some worker with one micro-batch in flight."""
        single = self._alone if self._deep else StageOptions(self.table, deep=True, relaxed=True)
        found, may_share = {(option.first, option.last) for option in single.all}, self.table.problem.may_share
        return sorted((first, last) for first, last in found if all(may_share[first : last + 1]))

    def find(self, first: int, last: int, group: int, stages: int = 1) -> StageOption | None:
        """As of `StageOptions`, for a set of any number of workers."""
        if group < len(self.table.groups):
            return self._alone.find(first, last, group, stages)
        at = bisect_left(self._intervals, (first, last))
        fits = self._intervals[at : at + 1] == [(first, last)]
        return next(iter(self._shared(self.sets[group], group, [at] if fits else [])), None)

    def alone(self, option: StageOption) -> Sequence[StageOption]:
        """As of `StageOptions`, in the order in which a plan names the workers."""
        if not option.named:
            return [option]
        return [self._each.levels(option.first, option.last, group)[0] for group in option.named]

    def seconds_of(self, option: StageOption, group: int) -> Floats:
        """What 0 .. M micro-batches of a stage take on a worker that shares it, at least; inf: too many."""
        return self._seconds([self._each.levels(option.first, option.last, group)])[:, 0]

    def _shared(
        self, members: tuple[int, ...], number: int, which: Sequence[int], below: float = math.inf
    ) -> list[StageOption]:
        """The stages that workers share, of the intervals with these numbers; `number` is that of their set."""
        table, problem, held = self.table, self.table.problem, [self._on(group) for group in members]
        whole = [n for n in which if all(levels[n] for levels, _ in held)]
        if not whole:
            return []
        shares, busiest = least_shares([seconds[:, whole] for _, seconds in held], each=1)
        choices, found, over = self._members(members), [], set[int]()
        ends_step = problem.options.objective == "step"  # the steady state has no update
        for column, n in enumerate(whole):
            problem.clock.check()
            first, last = self._intervals[n]
            if first in over or not busiest[column] < below:
                continue
            behind_s = self._update_s(first, last, members) + min(
                (problem.reduce_s(first, last, names) for names in choices), default=0.0
            )
            counted_s = behind_s if ends_step else 0.0
            if (ends_step and self._update_s(first, last, members) >= below) or math.isinf(behind_s):
                over.add(first)  # a longer stage has more to update; more to add up may take less, as was measured
            if math.isinf(behind_s) or not busiest[column] + counted_s < below:
                continue
            least = [levels[n][0] for levels, _ in held]
            found.append(
                StageOption(
                    first, last, number, min(each.forward_s for each in least), min(each.backward_s for each in least),
                    behind_s, (), 1, table.micro_batches, table.micro_batches,
                    tuple(shares[:, column].tolist()), float(busiest[column]), members,
                )
            )  # fmt: skip
        return found

    def _held_by(self, group: int) -> tuple[list[tuple[StageOption, ...]], Floats]:
        """The options of all intervals on a worker of a group, and what 0 .. M micro-batches take: [k, interval]."""
        levels = []
        for interval in self._intervals:
            self.table.problem.clock.check()
            levels.append(self._each.levels(*interval, group))
        return levels, self._seconds(levels)

    def _members(self, members: tuple[int, ...]) -> Sequence[tuple[str, ...]]:
        """The workers that a set may mean; empty: there are too many to look at.

        Of like workers it may be any; together with others it may matter which (`Problem.rings_differ`).
        """
        groups, counts = self.table.groups, Counter(members)
        if self.table.links_alike and (len(counts) == 1 or not self.table.problem.rings_differ):
            return [tuple(name for group, count in counts.items() for name in groups[group][:count])]
        if math.prod(math.comb(len(groups[group]), count) for group, count in counts.items()) > tuning.MOST_SETS:
            return []
        each = [itertools.combinations(groups[group], count) for group, count in counts.items()]
        return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*each)]

    def _update_s(self, first: int, last: int, members: Sequence[int]) -> float:
        """Seconds of the longest update; a shared parameter's way to other stages is left out."""
        rows = [self.table.rows[group][first : last + 1] for group in members]
        return max(sum(each.update_s for each in row if each is not None) for row in rows)

    def _seconds(self, levels: Sequence[Sequence[StageOption]]) -> Floats:
        """Seconds of 0 .. M micro-batches of each stage on one worker: [k, stage]."""
        most = self.table.micro_batches
        counts = np.arange(most + 1)
        if self._deep:  # how many of them are in flight is a choice, and one may be enough
            once: Floats = np.array([each[0].forward_s + each[0].backward_s if each else np.nan for each in levels])
            return np.outer(counts, once)
        found = np.full((most + 1, len(levels)), np.inf)
        for n, options in enumerate(levels):
            for option in options:
                held = slice(option.least_depth, option.bound_depth + 1)
                found[held, n] = counts[held] * (option.forward_s + option.backward_s)
        found[0] = 0.0
        return found
