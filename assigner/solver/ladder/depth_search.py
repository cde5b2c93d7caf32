"""The warm-up depths with which pipelines of a chain take least under 1F1B: branch and bound over boxes of depths.

A box gives each stage of a pipeline a range of depths. Whatever depths d are chosen of the ranges, low to high,

    F[m] starts behind  F[m-1];  B[m-high];  of m >= high, F[m-1] and one backward
    B[m] starts behind  B[m-1];  F[m+low-1];  of m <= M-high, B[m-1] and one forward;
                        any F[k] with k < m+low, then all forwards up to m+low-1 and as many backwards less low-1

on its worker, since there F[m] comes right behind B[m-d], and behind the messages from its neighbours. The longest way
through these conditions is a lower bound of the step time, and the step time itself where low = high everywhere. The
box of least bound is halved where its range is widest, in ratio. Many boxes are bounded at once.

Source: the longest path of a relaxed event graph as the bound of a branch and bound, as of job shops with heads and
tails (Carlier and Pinson, Management Science 35(2), 1989).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver import tuning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.ladder.depths import Depths
    from assigner.solver.prices import PriceTable, StageOption

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the stages of pipelines, [stage, pipeline], and of the boundaries in front of them.

    A pipeline with fewer stages than another has others in front that take no time.
    """

    forward: Floats
    backward: Floats
    busy_f: Floats
    busy_b: Floats
    update: Floats
    there: Floats
    back: Floats

    def take(self, which: Ints) -> _Times:
        return _Times(*(getattr(self, each.name)[:, which] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of depths: the ranges of the stages, [stage, box], the number of the pipeline, and a lower bound."""

    low: Ints
    high: Ints
    pipeline: Ints
    bound: Floats

    def take(self, which: Ints | Flags) -> _Boxes:
        return _Boxes(*(getattr(self, each.name)[..., which] for each in fields(self)))

    def join(self, other: _Boxes) -> _Boxes:
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return _Boxes(*(np.concatenate(pair, axis=-1) for pair in pairs))

    def halves(self) -> _Boxes:
        """Each box in two where its range is widest, held to depths that never grow; empty ones are left out."""
        each = np.arange(len(self.pipeline))
        at = np.argmax(self.high / self.low, axis=0)
        middle = np.sqrt(self.low[at, each] * self.high[at, each]).astype(np.int64)
        low, high = self.low.copy(), self.high.copy()
        high[at, each], low[at, each] = middle, middle + 1
        both = replace(self, high=high).join(replace(self, low=low))
        low = np.maximum.accumulate(both.low[::-1], axis=0)[::-1]
        high = np.minimum.accumulate(both.high, axis=0)
        return replace(both, low=low, high=high).take(np.flatnonzero((low <= high).all(axis=0)))


class DepthSearch:
    """The search over pipelines of one instance.

    Args:
        instance: Prices and links; of a chain.
        pipelines: Lower bounds of what pipelines take, in seconds, and their stages. A stage's depth is any from its
            option's `least` to its `promised`.

    Attributes:
        boxes: How many were bounded.
    """

    def __init__(self, instance: PriceTable, pipelines: Sequence[tuple[float, Sequence[StageOption]]]) -> None:
        self._most, self._pipelines = instance.micro_batches, [pipeline for _, pipeline in pipelines]
        self._stages = max(map(len, self._pipelines), default=1)
        columns = [self._column(instance, pipeline) for pipeline in self._pipelines]
        self._times = _Times(*np.array(columns).reshape(-1, len(fields(_Times)), self._stages).transpose(1, 2, 0))
        low, high = ([self._depths(each, name) for each in self._pipelines] for name in ("least", "promised"))
        self._open = _Boxes(
            np.array(low, dtype=np.int64).reshape(-1, self._stages).T,
            np.array(high, dtype=np.int64).reshape(-1, self._stages).T,
            np.arange(len(pipelines)),
            np.array([price for price, _ in pipelines]),
        )
        self.boxes = 0

    def _column(self, instance: PriceTable, pipeline: Sequence[StageOption]) -> list[list[float]]:
        """As `_Times` has them."""
        count = len(pipeline)
        busy_f, busy_b, there, back = ([0.0] * count for _ in range(4))
        for n, (left, right) in enumerate(itertools.pairwise(pipeline)):
            hop = instance.hop(right.first, left.group, right.group)
            assert hop is not None
            there[n + 1], back[n + 1] = hop.forward_s, hop.backward_s
            for side in (0, 1):
                busy_f[n + side] += hop.forward_busy[side]
                busy_b[n + side] += hop.backward_busy[side]
        rows = (
            [each.forward_s for each in pipeline], [each.backward_s for each in pipeline], busy_f, busy_b,
            [each.update_s for each in pipeline], there, back,
        )  # fmt: skip
        return [[0.0] * (self._stages - count) + row for row in rows]

    def _depths(self, pipeline: Sequence[StageOption], name: str) -> list[int]:
        return [self._most] * (self._stages - len(pipeline)) + [getattr(each, name) for each in pipeline]

    @property
    def bound(self) -> float:
        """No depths that were not handed out take less, in seconds; inf: there are no others."""
        return float(self._open.bound.min(initial=math.inf))

    def split(self, target: float) -> list[tuple[float, Sequence[StageOption], Depths]]:
        """Halve the boxes of least bound, and hand out those with nothing left to choose.

        Args:
            target: Boxes from here on are of no use.

        Returns:
            Bound, pipeline and depths, the least bound first.
        """
        boxes = self._open.take(self._open.bound < target)
        order = np.argsort(boxes.bound, kind="stable")
        halves = boxes.take(order[: tuning.BOXES_AT_ONCE]).halves()
        self.boxes += len(halves.pipeline)
        halves = replace(halves, bound=np.maximum(halves.bound, self._bounds(halves)))
        halves = halves.take(halves.bound < target)
        single = (halves.low == halves.high).all(axis=0)
        self._open = halves.take(~single).join(boxes.take(order[tuning.BOXES_AT_ONCE :]))
        found = []
        for n in sorted(np.flatnonzero(single).tolist(), key=halves.bound.__getitem__):
            pipeline = self._pipelines[halves.pipeline[n]]
            depths = halves.low[self._stages - len(pipeline) :, n].tolist()
            found.append((float(halves.bound[n]), pipeline, tuple(depths)))
        return found

    def _bounds(self, boxes: _Boxes) -> Floats:
        """The longest way of each box, in seconds."""
        return _Ways(self._times.take(boxes.pipeline), boxes.low, boxes.high, self._most).longest()


class _Ways:
    """The longest ways through the conditions of boxes, micro-batch by micro-batch.

    Before its backward of micro-batch m a stage has run its forwards up to m + low - 1, and the stages in front no
    fewer: with all of them done, from the first stage to the last, and then the backwards, every time follows from
    known ones. Arrays are [stage, micro-batch + 1, box]: when a worker is free again, and when a message is there.
    """

    def __init__(self, times: _Times, low: Ints, high: Ints, most: int) -> None:
        self._times, self._low, self._high, self._most = times, low, high, most
        self._stages, self._count = low.shape
        self._free_f, self._free_b, self._there, self._back = np.zeros((4, self._stages, most + 1, self._count))
        self._own_f, self._own_b = times.forward + times.busy_f, times.backward + times.busy_b
        self._held = -self._own_f - self._own_b  # when what comes before a backward in any case is over

    def longest(self) -> Floats:
        """Of each box, in seconds."""
        everywhere = np.arange(self._count)
        for m in range(self._low.max(initial=0)):  # the warm-up
            for s in range(self._stages):
                boxes = np.flatnonzero(self._low[s] > m)
                self._run_forward(s, np.full(len(boxes), m), boxes)
        for m in range(self._most):
            for s in range(self._stages) if m else ():
                at = m + self._low[s] - 1
                boxes = everywhere if at.max(initial=0) < self._most else np.flatnonzero(at < self._most)
                self._run_forward(s, at[boxes], boxes)
            for s in reversed(range(self._stages)):
                self._run_backward(s, m, everywhere)
        ends: Floats = (self._free_b[:, -1] + self._times.update).max(axis=0)
        return ends

    def _run_forward(self, s: int, m: Ints, boxes: Ints) -> None:
        """Micro-batches m of these boxes."""
        if not len(boxes):
            return
        times, turned = self._times, m - self._high[s, boxes] + 1  # backwards that are over
        one = np.where(turned > 0, self._own_b[s, boxes], 0.0)
        start = np.maximum(self._there[s, m + 1, boxes], self._free_f[s, m, boxes] + one)
        start = np.maximum(start, self._free_b[s, np.maximum(turned, 0), boxes])
        self._free_f[s, m + 1, boxes] = start + self._own_f[s, boxes]
        if s + 1 < self._stages:
            sent = np.maximum(start + times.forward[s, boxes], self._there[s + 1, m, boxes])
            self._there[s + 1, m + 1, boxes] = sent + times.there[s + 1, boxes]

    def _run_backward(self, s: int, m: int, boxes: Ints) -> None:
        """Micro-batch m of all boxes."""
        times, most, own_f = self._times, self._most, self._own_f[s]
        done = self._free_f[s, np.minimum(most, m + self._low[s]), boxes]
        one = np.where(m + self._low[s] <= most, own_f, 0.0)
        self._held[s] = np.maximum(done, self._held[s] + self._own_b[s] + one)
        start = np.maximum(self._back[s, m + 1], self._held[s])
        start = np.maximum(start, self._free_b[s, m] + np.where(m + self._high[s] <= most, own_f, 0.0))
        self._free_b[s, m + 1] = start + self._own_b[s]
        if s:
            sent = np.maximum(start + times.backward[s], self._back[s - 1, m])
            self._back[s - 1, m + 1] = sent + times.back[s]
