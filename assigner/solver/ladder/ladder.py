"""A dynamic program over pipelines whose price adds up stage by stage: 1F1B's bound, throughput, latency.

From the last stage to the first, each label is a suffix of a pipeline that starts at some position with some workers
used. A tally says how its price grows with one more stage in front. Labels that another one beats in every respect
go, and so do those whose most optimistic completion reaches the cutoff; if none had to go for want of room, the least
price found is a proven optimum over all pipelines.

Source: the dynamic program over (position, workers used, last worker) of label-setting shortest paths with resources
(Irnich and Desaulniers, 2005), from the back so that the number of stages behind, and with it memory, is known.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.ladder.rungs import Rung
from assigner.solver.ladder.tally import Boundary, Front, Marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.instance import Hop, Instance
    from assigner.solver.ladder.rungs import Rungs
    from assigner.solver.ladder.tally import Tally

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

CHAMPIONS = 12
"""So many labels of a state, those of least price, are compared with all its others."""


@dataclass(frozen=True)
class Climb:
    """What a run found.

    Args:
        pipelines: Whole pipelines with their price, the least first; rungs from the first stage to the last.
        lost: No pipeline that was lost for want of room or time has a lower price; inf: none was.
    """

    pipelines: tuple[tuple[float, tuple[Rung, ...]], ...]
    lost: float

    @property
    def complete(self) -> bool:
        """No label had to go for want of room: below the cutoff there is nothing else."""
        return math.isinf(self.lost)


@dataclass(slots=True)
class _Labels:
    """Suffixes that start at one position, as arrays of one length.

    `need` is the least warm-up depth that the next stage in front must have: no less than any behind it. `room` is the
    speed of the workers that are free.
    """

    price: Floats
    pend: Floats
    trip: Floats
    update: Floats
    need: Floats
    room: Floats
    used: Ints
    group: Ints
    stages: Ints
    option: Ints
    parent: Ints
    serial: Ints

    def take(self, which: Ints | NDArray[np.bool_]) -> _Labels:
        return _Labels(*(getattr(self, each.name)[which] for each in fields(self)))

    @property
    def marks(self) -> Marks:
        return Marks(self.price, self.pend, self.trip)


def _join(blocks: Sequence[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate([getattr(block, each.name) for block in blocks]) for each in fields(_Labels)))


class _Options:
    """The rungs as arrays, by (position behind them, group).

    Of a graph, only what lies on the spine adds up, and a warm-up depth binds only a stage on both ways of it.
    """

    def __init__(self, instance: Instance, rungs: Sequence[Rung], *, adds_up: bool) -> None:
        columns = [rung.column for rung in rungs]
        exact = instance.problem.exact or not adds_up
        times = np.array(
            [(c.forward_s, c.backward_s) if exact else instance.spine_s(c) for c in columns]
        ).reshape(-1, 2)  # fmt: skip
        both = exact | (times > 0).all(axis=1)
        promised = np.array([float(rung.promised) for rung in rungs])
        self.number = np.arange(len(rungs))
        self.first = np.array([column.first for column in columns], dtype=np.int64)
        self.front = Front(
            times[:, 0], times[:, 1],
            np.array([column.update_s for column in columns]) * (exact | (times[:, 1] > 0)),
            np.where(both, promised, instance.micro_batches),
            np.array([float(rung.least) for rung in rungs]) * exact,
        )  # fmt: skip
        self.ending: dict[tuple[int, int], list[int]] = {}
        for n, column in enumerate(columns):
            self.ending.setdefault((column.last + 1, column.group), []).append(n)


class Ladder:
    """The dynamic program of one instance.

    Args:
        instance: Prices and links.
        rungs: Its stages.
        tally: What a pipeline costs.
        until: A time of `time.monotonic` at which to stop with what is found.
    """

    def __init__(self, instance: Instance, rungs: Rungs, tally: Tally, *, until: float = math.inf) -> None:
        self._until = until
        self._instance, self._rungs, self._tally = instance, rungs, tally
        self._n = len(instance.problem.order)
        self._most = instance.problem.most_workers
        self._count = np.array([len(group) for group in instance.groups])
        self._place = np.cumprod([1, *(self._count + 1)])[:-1]
        self._rest = _Rest(instance)
        self._hops = cache(self._table)

    def _table(self, i: int, left: int) -> Floats | None:
        """Boundary i with a worker of `left` in front of it: a row for each group behind; None: there is no way."""
        hops = [self._instance.hops.get((i, left, right)) for right in range(len(self._instance.groups))]
        if not any(hops):
            return None
        return np.array(
            [
                (hop.forward_s, hop.backward_s, *self._busy(hop)) if hop else (np.inf,) * 4
                for hop in hops
            ]
        )  # fmt: skip

    def _busy(self, hop: Hop) -> tuple[float, float]:
        """Seconds in which the left and the right worker cannot compute; 0 where stages may run side by side."""
        if self._tally.adds_up and not self._instance.problem.exact:
            return 0.0, 0.0
        return hop.forward_busy[0] + hop.backward_busy[0], hop.forward_busy[1] + hop.backward_busy[1]

    @cached_property
    def _options(self) -> _Options:
        return _Options(self._instance, self._rungs.all, adds_up=self._tally.adds_up)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Worker names, like ones together."""
        return self._instance.groups

    def least(self, workers: Sequence[str] | None = None) -> float:
        """A price that no pipeline has less than, without looking at any: all work split perfectly; inf: impossible.

        Args:
            workers: Those that may be used; None: all.
        """
        n, none = self._n, np.zeros(1)
        if not np.isfinite(self._rest.work[n]):
            return math.inf
        weights = sorted(
            (
                float(weight)
                for weight, members in zip(self._rest.weight, self.groups, strict=True)
                for name in members
                if workers is None or name in workers
            ),
            reverse=True,
        )
        room = sum(weights[: self._most])
        level = np.array([self._rest.work[n] / room if room else math.inf]) if self._rest.work[n] > 0 else none
        marks = Marks(none, none, none)
        return float(self._tally.least(marks, self._rest.both[n:], self._rest.forward[n:], level)[0])

    def climb(self, *, cutoff: float = math.inf, width: int = 1000, dominance: bool = True, most: int = 64) -> Climb:
        """All the best pipelines below the cutoff, as far as there is room.

        Args:
            cutoff: Prices from here on are of no use.
            width: Labels kept at each position.
            dominance: Drop labels that another one beats in every mark. Without, every pipeline below the cutoff is
                found, if there is room.
            most: Pipelines returned.
        """
        self._history: dict[int, tuple[int, int]] = {}
        self._serial, lost = 0, math.inf
        buckets: list[list[_Labels]] = [[] for _ in range(self._n + 1)]
        self._start(buckets, cutoff)
        for position in range(self._n - 1, 0, -1):
            if not buckets[position]:
                continue
            if time.monotonic() > self._until:
                return Climb((), lost=0.0)
            labels, least = self._cut(_join(buckets[position]), position, width, dominance=dominance)
            lost = min(lost, least)
            buckets[position] = []
            self._history.update(
                zip(
                    labels.serial.tolist(),
                    zip(labels.option.tolist(), labels.parent.tolist(), strict=True),
                    strict=True,
                )
            )
            for stages in np.unique(labels.stages):
                if stages < self._most:
                    behind = labels.take(labels.stages == stages)
                    for left in range(len(self._instance.groups)):
                        if time.monotonic() > self._until:
                            return Climb((), lost=0.0)
                        self._extend(
                            behind, position=position, left=left, stage=int(stages) + 1, buckets=buckets, cutoff=cutoff
                        )
        if not buckets[0]:
            return Climb((), lost)
        whole = _join(buckets[0])
        price = self._tally.whole(whole.marks, whole.update)
        order = [n for n in np.lexsort((whole.serial, price)).tolist() if price[n] < cutoff]
        found = tuple((float(price[n]), self._pipeline(whole, n)) for n in order[:most])
        if len(order) > most:
            lost = min(lost, float(price[order[most]]))
        return Climb(found, lost)

    def _start(self, buckets: list[list[_Labels]], cutoff: float) -> None:
        options = self._options
        for group in range(len(self._instance.groups)):
            which = options.ending.get((self._n, group))
            if which:
                front = _pick(options.front, which)
                marks = self._tally.last(front)
                count = len(which)
                labels = _Labels(
                    marks.price, marks.pend, marks.trip, front.update, front.least,
                    np.full(count, self._rest.weight @ self._count - self._rest.weight[group]),
                    np.full(count, self._place[group]), np.full(count, group), np.full(count, 1),
                    options.number[which], np.full(count, -1), self._serials(count),
                )  # fmt: skip
                self._scatter(labels, options.first[which], buckets, cutoff)

    def _extend(
        self, labels: _Labels, *, position: int, left: int, stage: int, buckets: list[list[_Labels]], cutoff: float
    ) -> None:
        """Put every stage of group `left` that ends before `position` in front of every label."""
        table, options = self._hops(position, left), self._options
        which = options.ending.get((position, left))
        if table is None or not which:
            return
        free = (labels.used // self._place[left]) % (self._count[left] + 1) < self._count[left]
        labels = labels.take(free & np.isfinite(table[labels.group, 0]))
        if not len(labels.used):
            return
        hop = Boundary(*(column[:, None] for column in table[labels.group].T))
        front = _pick(options.front, which)
        old = Marks(labels.price[:, None], labels.pend[:, None], labels.trip[:, None])
        marks = self._tally.grow(old, hop, front)
        need = labels.need[:, None]
        least = np.maximum(need, self._rungs.usual(stage) if self._tally.flows else 0)
        price = np.where(front.promised >= least, marks.price, np.inf)  # else the stage behind would wait for ever
        many, count = len(which), len(labels.used)
        grown = _Labels(
            price.ravel(), marks.pend.ravel(), marks.trip.ravel(), np.tile(front.update, count),
            np.maximum(need, front.least).ravel(), np.repeat(labels.room - self._rest.weight[left], many),
            np.repeat(labels.used + self._place[left], many), np.full(many * count, left),
            np.full(many * count, stage), np.tile(options.number[which], count), np.repeat(labels.serial, many),
            self._serials(many * count),
        )  # fmt: skip
        self._scatter(grown, np.tile(options.first[which], count), buckets, cutoff)

    def _scatter(self, labels: _Labels, first: Ints, buckets: list[list[_Labels]], cutoff: float) -> None:
        """Hand labels on to their positions, but for those that cannot end below the cutoff."""
        keep = self._least(labels, first) < cutoff
        labels, first = labels.take(keep), first[keep]
        for position in np.unique(first):
            buckets[position].append(labels.take(first == position))

    def _least(self, labels: _Labels, first: Ints) -> Floats:
        """The least price that a pipeline with each suffix can have; inf: the rest cannot be placed."""
        rest = self._rest
        work = rest.work[first]
        none = labels.room <= 1e-9 * rest.weight.max()  # differences of floats do not end at 0
        level = np.where(work > 0, work / np.where(none, 1.0, labels.room), 0.0)
        level = np.where(none & (work > 0), np.inf, level)
        level = np.where((first > 0) & (labels.stages >= self._most), np.inf, level)
        return self._tally.least(labels.marks, rest.both[first], rest.forward[first], level)

    def _cut(self, labels: _Labels, position: int, width: int, *, dominance: bool) -> tuple[_Labels, float]:
        """The labels to go on with, and the least price that one lost for want of room could have had."""
        score = self._least(labels, np.full(len(labels.used), position))
        state = (labels.used * len(self._count) + labels.group) * (self._n + 1) + labels.stages
        order = np.lexsort((labels.serial, score, state))
        labels, score, state = labels.take(order), score[order], state[order]
        if dominance:
            kept = ~_dominated(labels, state)
            labels, score = labels.take(kept), score[kept]
        if len(score) <= width:
            return labels, math.inf
        best = np.lexsort((labels.serial, score))
        return labels.take(best[:width]), float(score[best[width]])

    def _serials(self, count: int) -> Ints:
        self._serial += count
        return np.arange(self._serial - count, self._serial)

    def _pipeline(self, whole: _Labels, index: int) -> tuple[Rung, ...]:
        found, parent = [self._rungs.all[int(whole.option[index])]], int(whole.parent[index])
        while parent >= 0:
            option, parent = self._history[parent]
            found.append(self._rungs.all[option])
        return tuple(found)


def _pick(front: Front, which: Sequence[int]) -> Front:
    return Front(*(getattr(front, each.name)[which] for each in fields(front)))


def _dominated(labels: _Labels, state: Ints) -> NDArray[np.bool_]:
    """True where another label of the same state is at least as good in every mark; sorted by state."""
    starts = np.flatnonzero(np.concatenate([[True], state[1:] != state[:-1]]))
    sizes = np.diff(np.concatenate([starts, [len(state)]]))
    home = np.repeat(starts, sizes)
    index = np.arange(len(state))
    gone = np.zeros(len(state), bool)
    for rank in range(min(CHAMPIONS, int(sizes.max()))):
        champion = np.minimum(home + rank, home + np.repeat(sizes, sizes) - 1)
        beats = (
            (labels.price[champion] <= labels.price) & (labels.pend[champion] <= labels.pend)
            & (labels.trip[champion] <= labels.trip) & (labels.update[champion] <= labels.update)
            & (labels.need[champion] <= labels.need)
        )  # fmt: skip
        gone |= beats & (champion < index) & ~gone[champion]
    return gone


class _Rest:
    """What lies in front of a position at its least: sums over the best worker each, and the perfect split.

    With any weights w[k] >= 0, loads of at most m give m sum(w) >= sum over partitions of min over k of w[k] t[i, k].
    """

    def __init__(self, instance: Instance) -> None:
        n, groups = len(instance.problem.order), len(instance.groups)
        both = np.full((groups, n), np.inf)
        ways = np.full((2, groups, n), np.inf)  # forward and backward, only what is on the spine
        spine = instance.problem.spine
        for k, i in itertools.product(range(groups), range(n)):
            price = instance.prices[k][i]
            if price is not None:
                again = price.recompute_s if instance.problem.remat_rules[i] == "always" else 0.0
                both[k, i] = price.forward_s + price.backward_s + again
                ways[0, k, i] = price.forward_s * spine.forward[i]
                ways[1, k, i] = (price.backward_s + again) * spine.backward[i]
        totals = np.where(np.isfinite(both), both, 0.0).sum(axis=1)
        self.weight: Floats = np.where(totals > 0, 1 / np.where(totals > 0, totals, 1.0), 0.0)
        finite = np.where(np.isfinite(both), both, 0.0)
        least = np.where(np.isfinite(both), finite * self.weight[:, None], np.inf).min(axis=0)
        self.work: Floats = np.concatenate([[0.0], np.cumsum(least)])
        self.both: Floats = np.concatenate([[0.0], np.cumsum(ways[0].min(axis=0) + ways[1].min(axis=0))])
        self.forward: Floats = np.concatenate([[0.0], np.cumsum(ways[0].min(axis=0))])
