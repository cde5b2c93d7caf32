"""How the price of a pipeline adds up, from its last stage to its first: the objectives of the dynamic program.

GPipeStep     the step time of GPipe, but for turns before the last stage
OneFOneBStep  a lower bound of the step time of 1F1B, and of any schedule where several workers may share a stage
SteadyState   M times the slowest worker or link of the steady state
Latency       one forward of one micro-batch

Every link has a wire of its own here; the wires that links share only delay.

Of a suffix of a pipeline each keeps a few marks, of which less is better: arrays [mark, label] or, where options are
put in front of labels, [mark, label, option].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from assigner.solver.problem.arrays import Columns, Floats


@dataclass(frozen=True, slots=True)
class FrontStages(Columns):
    """Stages about to be put in front, as arrays that broadcast: seconds, and the warm-up depths to reckon with.

    Of several workers that share a stage, seconds are those of the fastest one. `load` is what the busiest of them
    computes in a step; `alone` says that one worker has the stage; `update` and `tied` are as of `StageOption`.
    """

    forward: Floats
    backward: Floats
    update: Floats
    tied: Floats
    bound_depth: Floats
    least_depth: Floats
    load: Floats
    alone: Floats

    @property
    def behind(self) -> Floats:
        """Least seconds from the last backward to the end of an update."""
        return np.maximum(self.update, self.tied)


@dataclass(frozen=True, slots=True)
class FrontHops:
    """The boundary in front of each label, as of `Hop`: seconds on the wire, and in which each side is busy with it.

    `share` is that of the micro-batches which one link carries at least.
    """

    there: Floats
    back: Floats
    left_f: Floats
    right_f: Floats
    left_b: Floats
    right_b: Floats
    share: Floats

    @property
    def busy_left(self) -> Floats:
        """Both ways."""
        return self.left_f + self.left_b

    @property
    def busy_right(self) -> Floats:
        """Both ways."""
        return self.right_f + self.right_b


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left to be placed, at its least, for each label; levels are inf where it cannot be placed.

    Args:
        both: Seconds of one forward and one backward of all of it.
        forward: Of one forward.
        level: Per micro-batch, of the busiest worker.
        level_f, level_b: The same of its forwards, and of its backwards, alone.
        update: Of the update that follows the last backward of all; 0 where that is not left.
    """

    both: Floats
    forward: Floats
    level: Floats
    level_f: Floats
    level_b: Floats
    update: Floats


class PipelineObjective(Protocol):
    """How the price of a pipeline adds up.

    Attributes:
        adds_up: Times of several stages are added to a bound: of a graph, only of stages that wait for each other.
        flows: The pipeline must stay full: no stage warms up with fewer micro-batches than workers follow and its own.
        nothing: The marks of one pipeline without a stage.
    """

    adds_up: ClassVar[bool] = True
    flows: ClassVar[bool] = False
    nothing: ClassVar[Floats]

    def last(self, stage: FrontStages) -> Floats:
        """The marks of pipelines of one stage."""

    def grow(self, old: Floats, hop: FrontHops, stage: FrontStages) -> Floats:
        """The marks with one more stage in front."""

    def whole(self, marks: Floats) -> Floats:
        """The price of whole pipelines."""

    def least(self, marks: Floats, rest: Remainder) -> Floats:
        """The least price of a completion."""


def _marks(*rows: Floats | float) -> Floats:
    """Rows of one shape as one array."""
    return np.stack(np.broadcast_arrays(*rows))


@dataclass(frozen=True)
class GPipeStep(PipelineObjective):
    """The step time of GPipe of a chain without ties, the turn at its last stage, and a lower bound of any other.

    Identical jobs through a line of servers take the sum of one job plus M - 1 times the slowest server. Forward, the
    servers are the stages (f and what their messages keep them busy, g = f + busy) and the links between them (c);
    backward the same with b and c'. Stage s starts its update u when its own last backward is through. So, with the
    turn from forward to backward at stage t and the two line times F(t) and B(s, t),

        F(t)    = sum f[0..t] + sum c[0..t-1] + (M - 1) max(g[0..t], c[0..t-1])
        B(s, t) = sum b[s..t] + sum c'[s..t-1] + (M - 1) max(h[s..t], c'[s..t-1])          h = b + busy
        step    = max over s <= t of  F(t) + (g[t] - f[t]) + B(s, t) + max(h[s] - b[s] + u[s], v[s])

    Here v[s] is the least that an update has to wait for a gradient that the stage shares, from its last backward on.
    The turn is at the last stage, unless a stage's last message keeps it busy for longer than all that lies behind it
    takes: that is left out.

    Marks: sums of forwards and of backwards with their messages; the slowest server of each, the newest stage left
    out; the newest stage's own server times, and what its messages keep it busy backward; what keeps the last stage
    busy at the turn (-1: it has no left boundary yet); the latest end of an update, counted from the turn; the newest
    stage's own update, and what waits for its gradient.
    """

    nothing: ClassVar[Floats] = np.zeros((11, 1))
    micro_batches: int

    def last(self, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        forward, backward = stage.forward, stage.backward
        return _marks(forward, backward, 0.0, 0.0, forward, backward, 0.0, -1.0, 0.0, stage.update, stage.tied)

    def grow(self, old: Floats, hop: FrontHops, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        forward, backward, slow_f, slow_b, own_f, own_b, busy, turn, tail, update, tied = old
        # the newest stage's left boundary is known now, so its terms are complete
        slow_f = np.maximum(np.maximum(slow_f, own_f + hop.right_f), hop.there)
        slow_b = np.maximum(slow_b, own_b + hop.right_b)
        behind = np.maximum(busy + hop.right_b + update, tied)
        tail = np.maximum(tail, backward + self._others(slow_b) + behind)
        return _marks(
            forward + hop.there + stage.forward, backward + hop.back + stage.backward, slow_f,
            np.maximum(slow_b, hop.back), hop.left_f + stage.forward, hop.left_b + stage.backward, hop.left_b,
            np.where(turn < 0, hop.right_f, turn), tail, stage.update, stage.tied,
        )  # fmt: skip

    def whole(self, marks: Floats) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = self._turned(marks, 0.0) + self._ended(marks)
        return found

    def least(self, marks: Floats, rest: Remainder) -> Floats:
        """See `PipelineObjective`.

        What is placed ends its updates whatever the backwards in front of it still do; those come behind its own.
        """
        can = np.isfinite(rest.level)
        turned = self._turned(marks, np.where(can, rest.level_f, 0.0))
        through = turned + self._back(marks, np.where(can, rest.level_b, 0.0)) + rest.both + rest.update
        return np.where(can, np.maximum(through, turned + rest.forward + self._ended(marks)), np.inf)

    def _turned(self, marks: Floats, level: Floats | float) -> Floats:
        """When the backwards begin, where no server forward is faster than this level."""
        forward, _, slow, _, own, _, _, turn, *_ = marks
        servers = self._others(np.maximum(np.maximum(slow, own), level))
        found: Floats = forward + servers + np.maximum(turn, 0.0)
        return found

    def _back(self, marks: Floats, level: Floats | float) -> Floats:
        """From then on to the end of the newest stage's last backward, where no server backward is faster than this."""
        _, backward, _, slow, _, own, *_ = marks
        found: Floats = backward + self._others(np.maximum(np.maximum(slow, own), level))
        return found

    def _others(self, slowest: Floats) -> Floats:
        """How long all micro-batches but one take at the slowest server; without a price inf, also of a single one."""
        others = self.micro_batches - 1
        found: Floats = others * slowest if others else np.where(np.isinf(slowest), np.inf, 0.0)
        return found

    def _ended(self, marks: Floats) -> Floats:
        """From then on to the end of all updates of what is placed."""
        *_, busy, _, tail, update, tied = marks
        found: Floats = np.maximum(tail, self._back(marks, 0.0) + np.maximum(busy + update, tied))
        return found


@dataclass(frozen=True)
class OneFOneBStep(PipelineObjective):
    """A lower bound of the step time of any schedule that runs M micro-batches one forward, one backward at a time.

    Stage s cannot start before the stages in front have run one forward, and behind its last backward theirs follows.
    In between, with d micro-batches in flight and a trip through all stages behind and back,

        load                               its busiest worker computes so long: M (f + b) of one worker
        ceil(M / d) trip                   every d-th forward waits for a backward
        trip + (M-1) b + (M-d) f           while the first trip lasts, at most d forwards are done
        trip + (M-1) f + (M-d) b           when the last forward starts, at least M-d backwards have been done
        trip + (M-1) max(c, c')            its link carries one message at a time
        trip - (f + b) + load              if all forwards of a worker come before its first backward

    each is a bound of its own; those with d say nothing of a stage that several workers share. And behind its load each
    stage has its update, a shared one the reduce of its gradients in front of that, whatever the stages in front of it
    still do. Marks: the price but for the newest stage's own terms; those, its left boundary still unknown; the trip
    from its forward to its backward of one micro-batch; its update; the latest end of any update.
    """

    nothing: ClassVar[Floats] = np.zeros((5, 1))
    micro_batches: int
    forwards_first: bool = False

    def last(self, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        trip = stage.forward + stage.backward
        return _marks(self._window(stage, trip), stage.load, trip, stage.behind, stage.load + stage.behind)

    def grow(self, old: Floats, hop: FrontHops, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        price, pend, trip, _, end = old
        more = self.micro_batches - 1
        own = stage.forward + stage.backward
        way = hop.there + hop.back
        trip = trip + way + own
        closed = np.maximum(price, pend + more * hop.busy_right) + way + own
        link = trip + np.maximum(self.micro_batches * hop.share - 1, 0.0) * np.maximum(hop.there, hop.back)
        price = np.maximum(np.maximum(closed, link), self._window(stage, trip))
        end = np.maximum(end + hop.there + stage.forward, stage.load + stage.behind)
        return _marks(price, stage.load + more * hop.busy_left, trip, stage.behind, end)

    def _window(self, stage: FrontStages, trip: Floats) -> Floats:
        """What the warm-up depth costs: rounds of d, and what cannot be done while the first or last trip lasts."""
        m, f, b, d = self.micro_batches, stage.forward, stage.backward, stage.bound_depth
        rounds = np.ceil(m / d) * trip
        first = trip + (m - 1) * b + (m - d) * f
        last = trip + (m - 1) * f + (m - d) * b
        longest: Floats = np.where(stage.alone, np.maximum(rounds, np.maximum(first, last)), trip)
        return np.maximum(longest, trip - (f + b) + stage.load) if self.forwards_first else longest

    def whole(self, marks: Floats) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = np.maximum(np.maximum(marks[0], marks[1]) + marks[3], marks[4])
        return found

    def least(self, marks: Floats, rest: Remainder) -> Floats:
        """See `PipelineObjective`."""
        price = np.maximum(np.maximum(marks[0], marks[1]) + rest.both, self.micro_batches * rest.level)
        found: Floats = np.maximum(price, marks[4] + rest.forward)
        return found


@dataclass(frozen=True)
class SteadyState(PipelineObjective):
    """M times the slowest worker or link of the steady state: of a chain what `schedule.objective.steady_s` says.

    Marks: the price but for the newest stage; its load, its left boundary still unknown.
    """

    adds_up = False
    flows = True
    nothing: ClassVar[Floats] = np.zeros((2, 1))
    micro_batches: int

    def last(self, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        return _marks(0.0, stage.load)

    def grow(self, old: Floats, hop: FrontHops, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        m, (price, load) = self.micro_batches, old
        links = m * hop.share * np.maximum(hop.there, hop.back)
        price = np.maximum(np.maximum(price, load + m * hop.busy_right), links)
        return _marks(price, stage.load + m * hop.busy_left)

    def whole(self, marks: Floats) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = np.maximum(marks[0], marks[1])
        return found

    def least(self, marks: Floats, rest: Remainder) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = np.maximum(np.maximum(marks[0], marks[1]), self.micro_batches * rest.level)
        return found


@dataclass(frozen=True)
class Latency(PipelineObjective):
    """One forward of one micro-batch: exact for chains. Mark: the price."""

    nothing: ClassVar[Floats] = np.zeros((1, 1))

    def last(self, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        return stage.forward[None]

    def grow(self, old: Floats, hop: FrontHops, stage: FrontStages) -> Floats:
        """See `PipelineObjective`."""
        return old + hop.there + stage.forward

    def whole(self, marks: Floats) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = marks[0]
        return found

    def least(self, marks: Floats, rest: Remainder) -> Floats:
        """See `PipelineObjective`."""
        found: Floats = marks[0] + rest.forward
        return found
