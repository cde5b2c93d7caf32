"""The warm-up depths with which pipelines of a chain take least under 1F1B: branch and bound over boxes of depths.

A box gives each stage of a pipeline a range of depths. Whatever depths d are chosen of the ranges, low to high,

    F[m] starts behind  F[m-1];  B[m-high];  of m >= high, F[m-1] and one backward
    B[m] starts behind  B[m-1];  F[m+low-1];  of m <= M-high, B[m-1] and one forward;
                        any F[k] with k < m+low, then all forwards up to m+low-1 and as many backwards less low-1

on its worker, since there F[m] comes right behind B[m-d], and behind the messages from its neighbours. The longest way
through these conditions is a lower bound of the step time, and the step time itself where low = high everywhere. The
box of least bound is halved where its range is widest, in ratio. Many boxes are bounded at once.

Where workers share a stage, each one has its own micro-batches of that order: F[m-1] is then its last one before m, and
one backward is so many as it has between the two at any depth. Their links are taken for free when a message comes, and
their messages to keep nobody busy, so that the longest way is a lower bound there for any depths.

Source: the longest path of a relaxed event graph as the bound of a branch and bound, as of job shops with heads and
tails (Carlier and Pinson, Management Science 35(2), 1989).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.replication import takes
from assigner.solver.limits import tuning
from assigner.solver.problem.arrays import Columns, Floats, Ints
from assigner.solver.problem.stage_options import exactness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.pipelines.simulated import Depths, Priced
    from assigner.solver.problem.stage_options import StageOption, StageOptions


@dataclass(frozen=True, slots=True)
class _Times(Columns):
    """Seconds of the stages of pipelines, [stage, pipeline], and of the boundaries in front of them.

    A pipeline with fewer stages than another has others in front that take no time. `update` is what follows all that
    keeps a stage's worker busy.
    """

    forward: Floats
    backward: Floats
    busy_f: Floats
    busy_b: Floats
    update: Floats
    there: Floats
    back: Floats


class _Turns:
    """Whose turn each micro-batch is, by the number of a sharing; 0 is that of one worker.

    Attributes:
        taker: Which of the workers takes it: [sharing, micro-batch].
        place: Where a worker is in a list when it has run what it has of the first x: [sharing, worker, x]. Each begins
            at a place of its own, and goes on by one with each of its micro-batches.
        backwards: So many of its backwards at least lie between a forward and its last one before, if any does.
        forwards: Likewise of its forwards and a backward, if one lies behind it.
    """

    def __init__(self, shares: Sequence[tuple[int, ...]], most: int, check: Callable[[], None]) -> None:
        self.taker = np.array([takes(most, each) for each in shares])
        own = self.taker[:, None, :] == np.arange(max(map(len, shares)))[:, None]
        count = np.pad(np.cumsum(own, axis=2), ((0, 0), (0, 0), (1, 0)))
        room = count[..., -1:] + 1
        self.place = count + np.cumsum(room, axis=1) - room
        self.backwards, self.forwards = np.zeros((2, len(shares), most), dtype=np.int64)
        for n, each in enumerate(shares):
            if len(each) == 1:  # one of each lies between any two that follow each other
                self.backwards[n, 1:] = self.forwards[n, 1:] = 1
                continue
            for worker, run in enumerate(count[n]):
                for before, m in itertools.pairwise(np.flatnonzero(own[n, worker])):
                    check()
                    deep = np.arange(1, m + 1)
                    self.backwards[n, m] = (run[m + 1 - deep] - run[np.maximum(before + 1 - deep, 0)]).min()
                    deep = np.arange(1, most - m + 1)
                    self.forwards[n, m] = (run[m + deep] - run[before + deep]).min()


@dataclass(frozen=True, slots=True)
class _Boxes(Columns):
    """Boxes of depths: the ranges of the stages, [stage, box], the number of the pipeline, and a lower bound."""

    low: Ints
    high: Ints
    pipeline: Ints
    bound: Floats

    def halves(self) -> _Boxes:
        """Each box in two where its range is widest, held to depths that never grow; empty ones are left out."""
        each = np.arange(len(self.pipeline))
        at = np.argmax(self.high / self.low, axis=0)
        middle = np.sqrt(self.low[at, each] * self.high[at, each]).astype(np.int64)
        low, high = self.low.copy(), self.high.copy()
        high[at, each], low[at, each] = middle, middle + 1
        both = _Boxes.join([replace(self, high=high), replace(self, low=low)])
        low = np.maximum.accumulate(both.low[::-1], axis=0)[::-1]
        high = np.minimum.accumulate(both.high, axis=0)
        return replace(both, low=low, high=high).take(np.flatnonzero((low <= high).all(axis=0)))


class DepthSearch:
    """The search over pipelines of one instance.

    Args:
        options: What the stages are of; of a chain.
        pipelines: Lower bounds of what pipelines take, in seconds, and their stages. A stage's depth is any from its
            option's `least_depth` to its `bound_depth`; a shared one's `named` and `shares` say who has what of it.
        check: Raises what ends the search, OutOfTime, where its time is over.

    Attributes:
        boxes: How many were bounded.
    """

    def __init__(
        self, options: StageOptions, pipelines: Sequence[Priced], *, check: Callable[[], None] = lambda: None
    ) -> None:
        self._options, self._most, self._check = options, options.table.micro_batches, check
        self._pipelines = [pipeline for _, pipeline in pipelines]
        self._stages = max(map(len, self._pipelines), default=1)
        shares: dict[tuple[int, ...], int] = {(self._most,): 0}
        self._sharing = np.zeros((self._stages, len(pipelines)), dtype=np.int64)
        for n, pipeline in enumerate(self._pipelines):
            for stage, option in enumerate(pipeline, start=self._stages - len(pipeline)):
                if option.shares:
                    self._sharing[stage, n] = shares.setdefault(option.shares, len(shares))
        self._turns = _Turns(list(shares), self._most, check)
        columns = [self._column(pipeline) for pipeline in self._pipelines]
        rest = np.array(columns).reshape(-1, len(fields(_Times)) - 2, self._stages)
        self._times = _Times(*self._alone(), *rest.transpose(1, 2, 0))
        low, high = ([self._depths(each, name) for each in self._pipelines] for name in ("least_depth", "bound_depth"))
        self._open = _Boxes(
            np.array(low, dtype=np.int64).reshape(-1, self._stages).T,
            np.array(high, dtype=np.int64).reshape(-1, self._stages).T,
            np.arange(len(pipelines)),
            np.array([price for price, _ in pipelines]),
        )
        self.boxes = 0

    def _alone(self) -> Floats:
        """Seconds of one forward and one backward of each worker: [way, stage, worker, pipeline]."""
        workers = self._turns.place.shape[1]
        found = np.zeros((2, self._stages, workers, len(self._pipelines)))
        for n, pipeline in enumerate(self._pipelines):
            for stage, option in enumerate(pipeline, start=self._stages - len(pipeline)):
                for worker, each in enumerate(self._options.alone(option)):
                    found[:, stage, worker, n] = each.forward_s, each.backward_s
        return found

    def _column(self, pipeline: Sequence[StageOption]) -> list[list[float]]:
        """As `_Times` has them, behind a worker's forward and backward."""
        count = len(pipeline)
        busy_f, busy_b, there, back = ([0.0] * count for _ in range(4))
        for n, (left, right) in enumerate(itertools.pairwise(pipeline)):
            hop = self._options.hop(right.first, left.group, right.group)
            assert hop is not None
            there[n + 1], back[n + 1] = hop.forward_s, hop.backward_s
            for side in (0, 1):
                busy_f[n + side] += hop.forward_busy[side]
                busy_b[n + side] += hop.backward_busy[side]
        when_free = [max(each.update_s, each.tied_s - busy) for each, busy in zip(pipeline, busy_b, strict=True)]
        rows = busy_f, busy_b, when_free, there, back
        return [[0.0] * (self._stages - count) + row for row in rows]

    def _depths(self, pipeline: Sequence[StageOption], name: str) -> list[int]:
        return [self._most] * (self._stages - len(pipeline)) + [getattr(each, name) for each in pipeline]

    @property
    def bound(self) -> float:
        """No depths that were not handed out take less, in seconds; inf: there are no others."""
        return float(self._open.bound.min(initial=math.inf))

    def at(self, depths: Sequence[Depths]) -> Floats:
        """What pipelines with one worker a stage take at these depths, in seconds, as their options have it."""
        deep = np.array([[self._most] * (self._stages - len(each)) + list(each) for each in depths], dtype=np.int64).T
        return self._bounds(_Boxes(deep, deep, np.arange(len(depths)), np.zeros(len(depths))))

    def split(self, target: float) -> list[tuple[float, Sequence[StageOption], Depths]]:
        """Halve the boxes of least bound, and hand out those with nothing left to choose; none from the target on.

        Bound, pipeline and depths, the least bound first. Of a pipeline that is not exact those found first stand for
        all that are left, and so does their bound: depths as good are many, and none of them proves more.
        """
        boxes = self._open.take(self._open.bound < target)
        order = np.argsort(boxes.bound, kind="stable")
        now = min(tuning.BOXES_AT_ONCE, max(1, tuning.BOX_CELLS // (2 * self._stages * (self._most + 1))))
        halves = boxes.take(order[:now]).halves()
        self.boxes += len(halves.pipeline)
        halves = replace(halves, bound=np.maximum(halves.bound, self._bounds(halves)))
        halves = halves.take(halves.bound < target)
        single = (halves.low == halves.high).all(axis=0)
        self._open = _Boxes.join([halves.take(~single), boxes.take(order[now:])])
        found, over = [], set[int]()
        for n in sorted(np.flatnonzero(single).tolist(), key=halves.bound.__getitem__):
            number, bound = int(halves.pipeline[n]), float(halves.bound[n])
            pipeline = self._pipelines[number]
            if number in over:
                continue
            if exactness(pipeline) < 1:
                over.add(number)
                own = self._open.pipeline == number
                bound = float(self._open.bound[own].min(initial=bound))
                self._open = self._open.take(~own)
            depths = halves.low[self._stages - len(pipeline) :, n].tolist()
            found.append((bound, pipeline, tuple(depths)))
        return found

    def _bounds(self, boxes: _Boxes) -> Floats:
        """The longest way of each box, in seconds."""
        sharing = self._sharing[:, boxes.pipeline]
        ways = _Ways(self._times.take(boxes.pipeline), boxes.low, boxes.high, self._turns, sharing)
        return ways.longest(self._check)


def step_times(options: StageOptions, points: Sequence[tuple[Sequence[StageOption], Depths]]) -> Floats:
    """What pipelines of a chain with one worker a stage take at warm-up depths, many at once; arguments as above."""
    return DepthSearch(options, [(0.0, pipeline) for pipeline, _ in points]).at([at for _, at in points])


class _Ways:
    """The longest ways through the conditions of boxes, micro-batch by micro-batch.

    Before its backward of micro-batch m a stage has run its forwards up to m + low - 1, and the stages in front no
    fewer: with all of them done, from the first stage to the last, and then the backwards, every time follows from
    known ones. Arrays are [stage, place, box], when a worker is free again, by `_Turns.place`; [stage, micro-batch + 1,
    box], when a message is there; and [stage, worker, box], of a worker's last backward.
    """

    def __init__(self, times: _Times, low: Ints, high: Ints, turns: _Turns, sharing: Ints) -> None:
        self._times, self._low, self._high, self._most = times, low, high, turns.taker.shape[1]
        self._turns, self._sharing = turns, sharing
        self._stages, self._count = low.shape
        self._free_f, self._free_b = np.zeros((2, self._stages, turns.place.max() + 1, self._count))
        self._there, self._back = np.zeros((2, self._stages, self._most + 1, self._count))
        self._own_f, self._own_b = (
            each + busy[:, None] for each, busy in ((times.forward, times.busy_f), (times.backward, times.busy_b))
        )
        self._held = np.full(self._own_f.shape, -np.inf)  # when what it waits for in any case was over
        self._after = np.zeros(self._own_f.shape, dtype=np.int64)  # the place of its forwards then
        self._alone = np.logical_and(sharing[1:] == 0, sharing[:-1] == 0)  # one link has all messages of a boundary

    def longest(self, check: Callable[[], None]) -> Floats:
        """Of each box, in seconds; `check` as of `DepthSearch`."""
        everywhere = np.arange(self._count)
        for m in range(self._low.max(initial=0)):  # the warm-up
            check()
            for s in range(self._stages):
                boxes = np.flatnonzero(self._low[s] > m)
                self._run_forward(s, np.full(len(boxes), m), boxes)
        for m in range(self._most):
            check()
            for s in range(self._stages) if m else ():
                at = m + self._low[s] - 1
                boxes = everywhere if at.max(initial=0) < self._most else np.flatnonzero(at < self._most)
                self._run_forward(s, at[boxes], boxes)
            for s in reversed(range(self._stages)):
                self._run_backward(s, m, everywhere)
        ends: Floats = (self._free_b.max(axis=1) + self._times.update).max(axis=0)
        return ends

    def _run_forward(self, s: int, m: Ints, boxes: Ints) -> None:
        """Micro-batches m of these boxes."""
        if not len(boxes):
            return
        times, turns, sharing = self._times, self._turns, self._sharing[s, boxes]
        turned = m - self._high[s, boxes] + 1  # backwards that are over
        worker = turns.taker[sharing, m]
        at, over = turns.place[sharing, worker, m], turns.place[sharing, worker, np.maximum(turned, 0)]
        between = np.where(turned > 0, turns.backwards[sharing, m] * self._own_b[s, worker, boxes], 0.0)
        start = np.maximum(self._there[s, m + 1, boxes], self._free_f[s, at, boxes] + between)
        start = np.maximum(start, self._free_b[s, over, boxes])
        self._free_f[s, at + 1, boxes] = start + self._own_f[s, worker, boxes]
        if s + 1 < self._stages:
            queued = np.where(self._alone[s, boxes], self._there[s + 1, m, boxes], 0.0)
            sent = np.maximum(start + times.forward[s, worker, boxes], queued)
            self._there[s + 1, m + 1, boxes] = sent + times.there[s + 1, boxes]

    def _run_backward(self, s: int, m: int, boxes: Ints) -> None:
        """Micro-batch m of all boxes."""
        times, turns, most, sharing = self._times, self._turns, self._most, self._sharing[s]
        worker = turns.taker[sharing, m]
        own_f, own_b = self._own_f[s, worker, boxes], self._own_b[s, worker, boxes]
        at, after = turns.place[sharing, worker, m], turns.place[sharing, worker, np.minimum(most, m + self._low[s])]
        held = self._held[s, worker, boxes] + own_b + (after - self._after[s, worker, boxes]) * own_f
        held = np.maximum(self._free_f[s, after, boxes], held)
        self._held[s, worker, boxes], self._after[s, worker, boxes] = held, after
        start = np.maximum(self._back[s, m + 1], held)
        between = np.where(m + self._high[s] <= most, turns.forwards[sharing, m] * own_f, 0.0)
        start = np.maximum(start, self._free_b[s, at, boxes] + between)
        self._free_b[s, at + 1, boxes] = start + own_b
        if s:
            queued = np.where(self._alone[s - 1], self._back[s - 1, m], 0.0)
            sent = np.maximum(start + times.backward[s, worker, boxes], queued)
            self._back[s - 1, m + 1] = sent + times.back[s]
