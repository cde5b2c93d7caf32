"""How the price of a pipeline adds up, from its last stage to its first: three tallies for the ladder.

StepTally      a lower bound of the step time of 1F1B
SteadyTally    M times the slowest worker or link of the steady state
LatencyTally   one forward of one micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(slots=True)
class Marks:
    """What a tally keeps of a suffix; smaller is better in each.

    Args:
        price: Complete but for the newest stage's own terms.
        pend: The newest stage's own terms, its left boundary still unknown.
        trip: Seconds from the newest stage's forward to its backward of one micro-batch.
    """

    price: Floats
    pend: Floats
    trip: Floats


@dataclass(frozen=True, slots=True)
class Front:
    """Stages about to be put in front, as arrays that broadcast: seconds, and the deepest and least warm-up."""

    forward: Floats
    backward: Floats
    update: Floats
    promised: Floats
    least: Floats


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary in front of each label: columns of `Hop`, in seconds."""

    there: Floats
    back: Floats
    busy_left: Floats
    busy_right: Floats


class Tally(Protocol):
    """How the price of a pipeline adds up.

    Attributes:
        adds_up: Times of several stages are added: of a graph, only of stages that wait for each other.
        flows: The pipeline must stay full: no stage may warm up with fewer micro-batches than its schedule has it.
    """

    adds_up: ClassVar[bool]
    flows: ClassVar[bool]

    def last(self, stage: Front) -> Marks:
        """The marks of pipelines of one stage."""

    def grow(self, old: Marks, hop: Boundary, stage: Front) -> Marks:
        """The marks with one more stage in front."""

    def whole(self, marks: Marks, update: Floats) -> Floats:
        """The price of whole pipelines; `update` is of their first stage."""

    def least(self, marks: Marks, rest_s: Floats, rest_forward_s: Floats, level: Floats) -> Floats:
        """The least price of a completion.

        Args:
            marks: Of the suffixes.
            rest_s: Least forward and backward of all that is left.
            rest_forward_s: Least forward of all that is left.
            level: Least possible load, per micro-batch, of the busiest worker in what is left.
        """


@dataclass(frozen=True)
class StepTally:
    """A lower bound of the step time of any schedule that runs M micro-batches one forward, one backward at a time.

    Stage s cannot start before the stages in front have run one forward, and behind its last backward theirs follows.
    In between, with d micro-batches in flight and a trip through all stages behind and back,

        M (f + b)                          it works for all micro-batches
        ceil(M / d) trip                   every d-th forward waits for a backward
        trip + (M-1) b + (M-d) f           while the first trip lasts, at most d forwards are done
        trip + (M-1) f + (M-d) b           when the last forward starts, at least M-d backwards have been done
        trip + (M-1) max(c, c')            its link carries one message at a time

    each is a bound of its own.
    """

    adds_up: ClassVar[bool] = True
    flows: ClassVar[bool] = False
    micro_batches: int

    def last(self, stage: Front) -> Marks:
        """See `Tally`."""
        trip = stage.forward + stage.backward
        return Marks(self._window(stage, trip), self.micro_batches * trip, trip)

    def grow(self, old: Marks, hop: Boundary, stage: Front) -> Marks:
        """See `Tally`."""
        more = self.micro_batches - 1
        own = stage.forward + stage.backward
        way = hop.there + hop.back
        trip = old.trip + way + own
        closed = np.maximum(old.price, old.pend + more * hop.busy_right) + way + own
        link = trip + more * np.maximum(hop.there, hop.back)
        price = np.maximum(np.maximum(closed, link), self._window(stage, trip))
        return Marks(price, self.micro_batches * own + more * hop.busy_left, trip)

    def _window(self, stage: Front, trip: Floats) -> Floats:
        """What the warm-up depth costs: rounds of d, and what cannot be done while the first or last trip lasts."""
        m, f, b, d = self.micro_batches, stage.forward, stage.backward, stage.promised
        rounds = np.ceil(m / d) * trip
        first = trip + (m - 1) * b + (m - d) * f
        last = trip + (m - 1) * f + (m - d) * b
        longest: Floats = np.maximum(rounds, np.maximum(first, last))
        return longest

    def whole(self, marks: Marks, update: Floats) -> Floats:
        """See `Tally`."""
        return np.maximum(marks.price, marks.pend) + update

    def least(self, marks: Marks, rest_s: Floats, rest_forward_s: Floats, level: Floats) -> Floats:  # noqa: ARG002
        """See `Tally`."""
        return np.maximum(np.maximum(marks.price, marks.pend) + rest_s, self.micro_batches * level)


@dataclass(frozen=True)
class SteadyTally:
    """M times the slowest worker or link of the steady state: exact for chains."""

    adds_up: ClassVar[bool] = False
    flows: ClassVar[bool] = True
    micro_batches: int

    def last(self, stage: Front) -> Marks:
        """See `Tally`."""
        load = self.micro_batches * (stage.forward + stage.backward)
        return Marks(np.zeros_like(load), load, np.zeros_like(load))

    def grow(self, old: Marks, hop: Boundary, stage: Front) -> Marks:
        """See `Tally`."""
        m = self.micro_batches
        price = np.maximum.reduce([old.price, old.pend + m * hop.busy_right, m * hop.there, m * hop.back])
        load = m * (stage.forward + stage.backward + hop.busy_left)
        return Marks(np.broadcast_to(price, load.shape), load, np.zeros_like(load))

    def whole(self, marks: Marks, update: Floats) -> Floats:  # noqa: ARG002 - updates come once a step
        """See `Tally`."""
        return np.maximum(marks.price, marks.pend)

    def least(self, marks: Marks, rest_s: Floats, rest_forward_s: Floats, level: Floats) -> Floats:  # noqa: ARG002
        """See `Tally`."""
        return np.maximum(np.maximum(marks.price, marks.pend), self.micro_batches * level)


@dataclass(frozen=True)
class LatencyTally:
    """One forward of one micro-batch: exact for chains."""

    adds_up: ClassVar[bool] = True
    flows: ClassVar[bool] = False

    def last(self, stage: Front) -> Marks:
        """See `Tally`."""
        none = np.zeros_like(stage.forward)
        return Marks(stage.forward, none, none)

    def grow(self, old: Marks, hop: Boundary, stage: Front) -> Marks:
        """See `Tally`."""
        price = old.price + hop.there + stage.forward
        return Marks(price, np.zeros_like(price), np.zeros_like(price))

    def whole(self, marks: Marks, update: Floats) -> Floats:  # noqa: ARG002 - there is no update in a forward
        """See `Tally`."""
        return marks.price

    def least(self, marks: Marks, rest_s: Floats, rest_forward_s: Floats, level: Floats) -> Floats:  # noqa: ARG002
        """See `Tally`."""
        return marks.price + rest_forward_s
