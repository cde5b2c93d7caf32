"""A dynamic program over pipelines whose price adds up stage by stage: one for all schedules and objectives.

From the last stage to the first, each label is a suffix of a pipeline that starts at some position with some workers
used. An objective (objectives.py) says how its price grows with one more stage in front. Labels that another one beats
in every respect go, and so do those whose most optimistic completion reaches the cutoff; if none had to go for want of
room, the least price found is a proven optimum over all pipelines. With little room it is a beam: good plans at once.

Source: the dynamic program over (position, workers used, last worker) of label-setting shortest paths with resources
(Irnich and Desaulniers, 2005), from the back so that the number of stages behind, and with it memory, is known; cut to
a beam as in P. S. Ow and T. E. Morton, Filtered beam search in scheduling, IJPR 26(1), 1988.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.limits import tuning
from assigner.solver.problem.arrays import Columns, Flags, Floats, Ints
from assigner.solver.problem.objectives import FrontHops, FrontStages
from assigner.solver.problem.perfect_split import WorkBefore
from assigner.solver.problem.stage_options import StageOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.problem.interval_prices import Hop, IntervalPrices
    from assigner.solver.problem.objectives import PipelineObjective
    from assigner.solver.problem.stage_options import StageOptions


@dataclass(frozen=True)
class PricedPipelines:
    """What a run found.

    Args:
        pipelines: Whole pipelines with their price, the least first; stage options from the first stage to the last.
        lost: No pipeline that was lost for want of room or time has a lower price; inf: none was.
    """

    pipelines: tuple[tuple[float, tuple[StageOption, ...]], ...]
    lost: float

    @property
    def complete(self) -> bool:
        """No label had to go for want of room: below the cutoff there is nothing else."""
        return math.isinf(self.lost)


@dataclass(slots=True)
class _Labels(Columns):
    """Suffixes that start at one position, as arrays of one length.

    `marks` are the objective's. `need` is the least warm-up depth that the next stage in front must have: no less than
    any behind it. `set` is the number of the newest stage's replica set.
    """

    marks: Floats
    need: Floats
    used: Ints
    workers: Ints
    set: Ints
    stages: Ints
    option: Ints
    parent: Ints
    serial: Ints


class _OptionArrays:
    """The stage options as arrays, by (position behind them, replica set).

    Of a graph, only what lies on the spine adds up, and a warm-up depth binds only a stage on both ways of it.
    """

    def __init__(self, table: IntervalPrices, options: Sequence[StageOption], *, adds_up: bool) -> None:
        exact = table.problem.exact or not adds_up
        times = np.array(
            [(c.forward_s, c.backward_s) if exact else table.spine_s(c) for c in options]
        ).reshape(-1, 2)  # fmt: skip
        both = exact | (times > 0).all(axis=1)
        shared_s = np.array([option.busiest_s for option in options]).reshape(-1)
        alone = shared_s == 0
        promised = np.array([float(option.bound_depth) for option in options])
        ends = exact | (times[:, 1] > 0)  # its update may be the last of a way
        self.first = np.array([c.first for c in options], dtype=np.int64)
        self.front = FrontStages(
            times[:, 0], times[:, 1],
            np.array([c.update_s for c in options]) * ends, np.array([c.tied_s for c in options]) * ends,
            np.where(both, promised, table.micro_batches),
            np.array([float(option.least_depth) for option in options]) * exact,
            np.where(alone, table.micro_batches * times.sum(axis=1), shared_s * both), alone,
        )  # fmt: skip
        self.ending: dict[tuple[int, int], list[int]] = {}
        for n, option in enumerate(options):
            self.ending.setdefault((option.last + 1, option.group), []).append(n)


class DynamicProgram:
    """The dynamic program over pipelines of some stage options.

    Attributes:
        work: Labels that its runs have tried to make so far, and what each visit of a position and a set takes besides.
    """

    def __init__(self, stage_options: StageOptions, objective: PipelineObjective) -> None:
        self.work = 0
        self.table = table = stage_options.table
        self._clock = table.problem.clock
        self._stage_options, self._objective = stage_options, objective
        self._n = len(table.problem.order)
        self._most = table.most_workers
        self._count = np.array([len(group) for group in table.groups])
        self._place = np.cumprod([1, *(self._count + 1)])[:-1]
        self._rest = WorkBefore(table)
        self._hops = cache(self._message_prices)

    @cached_property
    def _uses(self) -> Ints:
        """Workers of each group in each replica set; which sets there are may hang on the best plan so far."""
        sets = self._stage_options.sets
        return np.array([[members.count(group) for group in range(len(self._count))] for members in sets])

    def _message_prices(self, i: int, left: int) -> Floats | None:
        """Boundary i with the replica set `left` in front: a row for each set behind; None: there is no way."""
        hops = [self._stage_options.hop(i, left, right) for right in range(len(self._uses))]
        if not any(hops):
            return None
        return np.array(
            [
                (hop.forward_s, hop.backward_s, *self._busy(hop), hop.share) if hop else (np.inf,) * 7
                for hop in hops
            ]
        )  # fmt: skip

    def _busy(self, hop: Hop) -> tuple[float, ...]:
        """Seconds in which the left and the right worker cannot compute; 0 where stages may run side by side."""
        if self._objective.adds_up and not self.table.problem.exact:
            return (0.0,) * 4
        return *hop.forward_busy, *hop.backward_busy

    @cached_property
    def _options(self) -> _OptionArrays:
        return _OptionArrays(self.table, self._stage_options.all, adds_up=self._objective.adds_up)

    def least(self, workers: Sequence[str] | None = None) -> float:
        """No pipeline of these workers, None: of all, has a lower price: all work split perfectly; inf: impossible."""
        if not np.isfinite(self._rest.work[:, self._n]).all():
            return math.inf
        counts = [sum(workers is None or name in workers for name in members) for members in self.table.groups]
        room = np.array([np.sort(np.repeat(weight, counts))[::-1][: self._most].sum() for weight in self._rest.weight])
        rest = self._rest.before(np.array([self._n]), room[:, None])
        return float(self._objective.least(self._objective.nothing, rest)[0])

    def price(self, pipeline: Sequence[StageOption]) -> float:
        """What the objective says of a pipeline of any stage options; inf: two neighbours have no way between them."""
        marks = self.marks(pipeline)
        return math.inf if marks is None else float(self._objective.whole(marks)[0])

    def marks(self, pipeline: Sequence[StageOption]) -> Floats | None:
        """The objective's marks of one pipeline, or of the stages that one ends with; None: there is no way."""
        front = _OptionArrays(self.table, pipeline, adds_up=self._objective.adds_up).front
        marks = self._objective.last(front.take([len(pipeline) - 1]))
        for n in range(len(pipeline) - 2, -1, -1):
            hop_s = self._hops(pipeline[n + 1].first, pipeline[n].group)
            if hop_s is None:
                return None
            hop = FrontHops(*(column[None, None] for column in hop_s[pipeline[n + 1].group]))
            marks = self._objective.grow(marks[:, :, None], hop, front.take([n])).reshape(len(marks), 1)
        return marks

    def run(
        self, *, cutoff: float = math.inf, width: int = 1000, made: float = math.inf, dominance: bool = True,
        most: int = 64,
    ) -> PricedPipelines:  # fmt: skip
        """All the best pipelines below the cutoff, as far as there is room.

        Args:
            cutoff: Prices from here on are of no use.
            width: Labels kept at each position.
            made: Labels that may be made in front of those: with many options to choose from, fewer are kept.
            dominance: Drop labels that another one beats in every mark. Without, every pipeline below the cutoff is
                found, if there is room.
            most: Pipelines returned.

        Raises:
            OutOfTime: the time is over.
        """
        self._history: dict[int, tuple[int, int]] = {}
        alone = self._objective.whole(self._objective.last(self._options.front)) < cutoff
        self._ending = {at: [n for n in which if alone[n]] for at, which in self._options.ending.items()}
        self._front = self._front_sums()
        width = int(max(50, min(width, made / max(1, alone.sum()))))
        self._serial, self._cutoff, lost = 0, cutoff, math.inf
        self._buckets: list[list[_Labels]] = [[] for _ in range(self._n + 1)]
        self._start()
        for position in range(self._n - 1, 0, -1):
            if not self._buckets[position]:
                continue
            labels, least = self._cut(_Labels.join(self._buckets[position]), position, width, dominance=dominance)
            lost = min(lost, least)
            self._buckets[position] = []
            whence = zip(labels.option.tolist(), labels.parent.tolist(), strict=True)
            self._history.update(zip(labels.serial.tolist(), whence, strict=True))
            for stages in np.unique(labels.stages):
                if stages < self._most:
                    behind = labels.take(labels.stages == stages)
                    for left in range(len(self._uses)):
                        self._extend(behind, position, left)
        ends = self._buckets.pop(0)
        if not ends:
            return PricedPipelines((), lost)
        whole = _Labels.join(ends)
        if self._stage_options.only_shared:
            whole = whole.take(whole.workers > whole.stages)
        price = self._objective.whole(whole.marks)
        order = [n for n in np.lexsort((whole.serial, price)).tolist() if price[n] < cutoff]
        found = tuple((float(price[n]), self._pipeline(whole, n)) for n in order[:most])
        if len(order) > most:
            lost = min(lost, float(price[order[most]]))
        return PricedPipelines(found, lost)

    @property
    def sharp(self) -> bool:
        """Whether least sums in front of every position are made beforehand, for all workers used behind it."""
        return self._n * len(self._uses) ** 2 * int(np.prod(self._count + 1)) <= tuning.FRONT_SUMS

    def _front_sums(self) -> Floats | None:
        """Least seconds of one forward and one backward in front of a position, with the boundary at it.

        By [position, replica set behind it, workers used behind it]; None: there are too many.
        """
        sets, states = len(self._uses), int(np.prod(self._count + 1))
        if not self.sharp:
            return None
        used, front = np.arange(states), self._options.front
        found = np.full((self._n, sets, states), np.inf)
        found[0] = 0.0
        for position in range(1, self._n):
            for left, uses in enumerate(self._uses):
                self._clock.check()
                hop_s, which = self._hops(position, left), self._ending.get((position, left))
                if hop_s is None or not which:
                    continue
                free = np.flatnonzero(self._has(used, left))
                own = front.forward[which] + front.backward[which]
                sums = found[self._options.first[which], left][:, free + uses @ self._place] + own[:, None]
                found[position][:, free] = np.minimum(
                    found[position][:, free], (hop_s[:, 0] + hop_s[:, 1])[:, None] + sums.min(axis=0)
                )
        return found

    def _start(self) -> None:
        options = self._options
        for number, uses in enumerate(self._uses):
            which = self._ending.get((self._n, number))
            if which and uses.sum() <= self._most:
                front = options.front.take(which)
                count = len(which)
                labels = _Labels(
                    self._objective.last(front), front.least_depth, np.full(count, uses @ self._place),
                    np.full(count, uses.sum()), np.full(count, number), np.full(count, 1), np.array(which),
                    np.full(count, -1), self._serials(count),
                )  # fmt: skip
                self._scatter(labels, options.first[which])

    def _extend(self, labels: _Labels, position: int, left: int) -> None:
        """Put every stage of replica set `left` that ends before `position` in front of every label."""
        self._clock.check()
        hop_s = self._hops(position, left)
        which = self._ending.get((position, left))
        if hop_s is None or not which:
            return
        self.work += tuning.VISIT_WORK + len(which) * len(labels.used)
        fits = labels.workers + self._uses[left].sum() <= self._most
        labels = labels.take(fits & self._has(labels.used, left) & np.isfinite(hop_s[labels.set, 0]))
        at_once = max(1, tuning.GROWN // len(which))
        for start in range(0, len(labels.used), at_once):
            self._clock.check()
            some = labels.take(np.arange(start, min(start + at_once, len(labels.used))))
            self._grow(some, hop_s, which, left)

    def _has(self, used: Ints, number: int) -> Flags:
        """Whether the workers of a replica set are left where so many of each group are used."""
        taken = used // self._place[:, None] % (self._count[:, None] + 1)
        fits: Flags = (taken + self._uses[number][:, None] <= self._count[:, None]).all(axis=0)
        return fits

    def _grow(self, labels: _Labels, hop_s: Floats, which: Sequence[int], left: int) -> None:
        """Put each of these options of replica set `left` in front of every label; all have as many stages."""
        options, uses, stage = self._options, self._uses[left], int(labels.stages[0]) + 1
        hop = FrontHops(*(column[:, None] for column in hop_s[labels.set].T))
        front = options.front.take(which)
        marks = self._objective.grow(labels.marks[:, :, None], hop, front)
        need = labels.need[:, None]
        least = np.maximum(need, self._stage_options.usual(stage) if self._objective.flows else 0)
        marks[0] = np.where(front.bound_depth >= least, marks[0], np.inf)  # else the stage behind would wait for ever
        many, count = len(which), len(labels.used)
        grown = _Labels(
            marks.reshape(len(marks), -1), np.maximum(need, front.least_depth).ravel(),
            np.repeat(labels.used + uses @ self._place, many), np.repeat(labels.workers + uses.sum(), many),
            np.full(many * count, left),
            np.full(many * count, stage), np.tile(which, count), np.repeat(labels.serial, many),
            self._serials(many * count),
        )  # fmt: skip
        self._scatter(grown, np.tile(options.first[which], count))

    def _scatter(self, labels: _Labels, first: Ints) -> None:
        """Hand labels on to their positions, but for those that cannot end below the cutoff."""
        keep = self._least(labels, first) < self._cutoff
        labels, first = labels.take(keep), first[keep]
        for position in np.unique(first):
            self._buckets[position].append(labels.take(first == position))

    def _least(self, labels: _Labels, first: Ints) -> Floats:
        """The least price that a pipeline with each suffix can have; inf: the rest cannot be placed."""
        self._clock.check()
        free = self._count[:, None] - labels.used // self._place[:, None] % (self._count[:, None] + 1)
        free[:, labels.workers >= self._most] = 0
        both = 0.0 if self._front is None else self._front[first, labels.set, labels.used]
        rest = self._rest.before(first, self._rest.weight @ free, both)
        return self._objective.least(labels.marks, rest)

    def _cut(self, labels: _Labels, position: int, width: int, *, dominance: bool) -> tuple[_Labels, float]:
        """The labels to go on with, and the least price that one lost for want of room could have had."""
        score = self._least(labels, np.full(len(labels.used), position))
        state = (labels.used * len(self._uses) + labels.set) * (self._n + 1) + labels.stages
        order = np.lexsort((labels.serial, score, state))
        labels, score, state = labels.take(order), score[order], state[order]
        if dominance:
            kept = ~_dominated(labels, state)
            labels, score = labels.take(kept), score[kept]
        lost = math.inf
        if len(score) > width:
            best = np.lexsort((labels.serial, score))
            lost = float(score[best[width]])
            labels = labels.take(best[:width])
        return labels, lost

    def _serials(self, count: int) -> Ints:
        self._serial += count
        return np.arange(self._serial - count, self._serial)

    def _pipeline(self, whole: _Labels, index: int) -> tuple[StageOption, ...]:
        found, parent = [self._stage_options.all[int(whole.option[index])]], int(whole.parent[index])
        while parent >= 0:
            option, parent = self._history[parent]
            found.append(self._stage_options.all[option])
        return tuple(found)


def _dominated(labels: _Labels, state: Ints) -> Flags:
    """True where another label of the same state is at least as good in every mark; sorted by state."""
    starts = np.flatnonzero(np.concatenate([[True], state[1:] != state[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(state)]]))
    home, sizes = np.repeat(starts, counts), np.repeat(counts, counts)  # of each one's state
    index = np.arange(len(state))
    gone = np.zeros(len(state), bool)
    for rank in range(min(tuning.CHAMPIONS, int(sizes.max()))):
        champion = np.minimum(home + rank, home + sizes - 1)
        beats = labels.need[champion] <= labels.need
        for mark in labels.marks:
            beats &= mark[champion] <= mark
        gone |= beats & (champion < index) & ~gone[champion]
    return gone
