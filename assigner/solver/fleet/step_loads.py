"""How long a step of 1F1B keeps a stage from its first forward to its last backward, by what lies behind the stage.

Before its first backward a stage runs as many forwards as it keeps in flight, and behind its last forward as many
backwards. What a micro-batch is away for, from the end of its forward to the beginning of its backward, is the trip: if
that takes longer than these, the stage waits. With w of M micro-batches in flight, f, b the seconds of one forward and
one backward and R those of the trip, a step takes no less than the largest of

    M (f + b) + max(0, R - (w - 1) f) + max(0, R - (w - 1) b)         w < M
    R + f + b + (M - 1) max(f, b)                                     w = M: all forwards are behind it by then
    ceil(M / w) (R + f + b)                                           no more than w are on the way at once

More in flight hides a longer trip, and takes memory, or the seconds of what is run again for want of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.problem.arrays import Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.solver.fleet.hop_arrays import HopArrays
    from assigner.solver.fleet.path_program import LeastTrips
    from assigner.solver.problem.prices import PriceTable, WorkerKind


@dataclass(frozen=True)
class StagePrices:
    """Seconds of every interval with so many micro-batches in flight: arrays [kind, first, length - 1].

    Args:
        arrays: Forwards, and backwards with what is run again, inf: it does not fit.
        busy: Seconds of a forward and a backward in which messages keep the worker from computing, at least.
    """

    arrays: OptionArrays
    busy: tuple[Floats, Floats]

    @classmethod
    def of(
        cls, table: PriceTable, kinds: Sequence[WorkerKind], longest: int, links: HopArrays, in_flight: int
    ) -> StagePrices:
        """Of workers by kind, and of intervals of up to so many partitions."""
        arrays = OptionArrays(table, kinds, longest, links, np.full(len(table.problem.order), float(in_flight)))
        servers = (arrays.stages.forward, arrays.forward), (arrays.stages.backward, arrays.backward)
        forward, backward = (_known(whole) - _known(alone) for whole, alone in servers)
        return cls(arrays, (forward, backward))

    def load(self, many: int) -> Floats:
        """Seconds of a step of `many` micro-batches in which the worker is busy; inf: there is no such stage."""
        busy_f, busy_b = self.busy
        loads: Floats = many * (self.arrays.forward + self.arrays.backward) + (many - 1) * (busy_f + busy_b)
        loads[:, 0] += self.arrays.update[:, 0]
        return loads


def _known(seconds: Floats) -> Floats:
    found: Floats = np.where(np.isfinite(seconds), seconds, 0.0)
    return found


def _with_waits(
    load: Floats, alone: tuple[Floats, Floats], pace: tuple[Floats, Floats], *, many: int, deepest: Ints, trip: Floats
) -> Floats:
    """What a step takes from a stage's first forward to its last backward.

    Args:
        load: Seconds in which the worker is busy.
        alone: Of a forward and a backward.
        pace: The same with what messages keep the worker busy behind each.
        many: Micro-batches in the step.
        deepest: In flight.
        trip: Seconds from the end of a forward to the beginning of its backward, at least.
    """
    (forward, backward), (pace_f, pace_b) = alone, pace
    trip_f = trip + forward
    turns = trip_f + backward + (many - 1) * np.maximum(pace_f, pace_b)
    idle = np.maximum(0.0, trip_f - deepest * pace_f) + np.maximum(0.0, trip_f - pace_f - (deepest - 1) * pace_b)
    rounds = np.maximum(load + idle, np.ceil(many / deepest) * (trip_f + backward))
    found: Floats = np.where(deepest < many, rounds, np.maximum(load, turns))
    return found


class _Depths:
    """Stages at several depths, by the number of each.

    Args:
        prices: Of each depth.
        depths: Micro-batches in flight: the most that prices stand for.
        many: Micro-batches in a step.
    """

    def __init__(self, prices: Sequence[StagePrices], depths: Ints, many: int) -> None:
        self._depths, self._many = depths, many
        forward, backward = (
            np.stack([_known(getattr(each.arrays, way)) for each in prices]) for way in ("forward", "backward")
        )
        busy_f, busy_b = (np.stack([each.busy[way] for each in prices]) for way in (0, 1))
        self._prices = np.stack(
            [np.stack([each.load(many) for each in prices]), forward, backward, forward + busy_f, backward + busy_b]
        )

    def loads(self, kind: int, first: int, numbers: Ints | int, trips: Floats) -> Floats:
        """Seconds [length, trip], of stages from a position on, each with its own trip behind it.

        Args:
            kind: Of their worker.
            first: Where they start.
            numbers: The depth's, of each trip.
            trips: Seconds [length, trip].
        """
        load, forward, backward, pace_f, pace_b = (
            each.T.reshape(len(trips), -1) for each in self._prices[:, numbers, kind, first, : len(trips)]
        )
        return _with_waits(
            load, (forward, backward), (pace_f, pace_b), many=self._many, deepest=self._depths[numbers], trip=trips
        )


class DepthLoads:
    """Loads of stages that keep as many micro-batches in flight as are to hide the stages behind them: for plans.

    Args:
        depths: Micro-batches in flight, by the number of workers from the stage on.
        prices: By depth.
        many: Micro-batches in a step.
        trips: The least that lies behind.
    """

    def __init__(self, depths: Ints, prices: Mapping[int, StagePrices], many: int, trips: LeastTrips) -> None:
        each, which = np.unique(depths[trips.workers], return_inverse=True)
        self._which, self._each = which, _Depths([prices[depth] for depth in each.tolist()], each, many)
        self._trips = trips

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> Floats:
        """Seconds [length, number]."""
        trips = self._trips.behind(first, length)
        return self._trips.each(self._each.loads(kind, first, self._which, trips), numbers)


class TripLoads:
    """The least loads of stages by the trip that lies behind them, whatever they keep in flight: for bounds.

    Args:
        prices: By the least in flight of each band of depths: the prices, and the most of it.
        many: Micro-batches in a step.
        trips: The least that lies behind.
    """

    def __init__(self, prices: Sequence[tuple[StagePrices, int]], many: int, trips: LeastTrips) -> None:
        bands, most = zip(*prices, strict=True)
        self._count, self._each, self._trips = len(bands), _Depths(bands, np.array(most), many), trips

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> Floats:
        """Seconds [length, number]."""
        trips = self._trips.behind(first, length)
        bands = (self._each.loads(kind, first, band, trips) for band in range(self._count))
        return self._trips.each(functools.reduce(np.minimum, bands), numbers)
