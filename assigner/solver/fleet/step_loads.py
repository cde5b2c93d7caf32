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

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.limits import tuning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.fleet.hop_arrays import HopArrays
    from assigner.solver.problem.prices import PriceTable, WorkerKind

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


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

    def waiting_load(self, many: int, deepest: int, trip: float) -> Floats:
        """As `load`, with what the stage waits for a trip of so many seconds, `deepest` micro-batches in flight."""
        forward, backward, load = _known(self.arrays.forward), _known(self.arrays.backward), self.load(many)
        pace_f, pace_b = forward + self.busy[0], backward + self.busy[1]
        round_ = trip + forward + backward
        update = np.zeros_like(load)
        update[:, 0] = self.arrays.update[:, 0]
        found: Floats
        if deepest >= many:
            found = np.maximum(load, round_ + (many - 1) * np.maximum(pace_f, pace_b) + update)
            return found
        idle = np.maximum(0.0, trip + forward - deepest * pace_f)
        idle += np.maximum(0.0, trip + forward - pace_f - (deepest - 1) * pace_b)
        found = np.maximum(load + idle, math.ceil(many / deepest) * round_ + update)
        return found


def _known(seconds: Floats) -> Floats:
    found: Floats = np.where(np.isfinite(seconds), seconds, 0.0)
    return found


class DepthLoads:
    """Loads of stages that keep as many micro-batches in flight as are to hide the stages behind them: for plans.

    Args:
        depths: Micro-batches in flight, by the number of workers from the stage on.
        loads: Their loads, by depth.
        workers: How many workers each number of the path program stands for.
    """

    def __init__(self, depths: Ints, loads: dict[int, Floats], workers: Ints) -> None:
        self._loads = np.stack([loads[depth] for depth in depths.tolist()])
        self._workers = workers

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> Floats:
        """Seconds [length, number]."""
        found: Floats = self._loads[self._workers[numbers], kind, first, :length].T
        return found


class TripLoads:
    """The least loads of stages by the trip that lies behind them, whatever they keep in flight: for bounds.

    Args:
        prices: By the least in flight of each band of depths: the prices, and the most of it.
        many: Micro-batches in a step.
        trips: Least seconds of everything from each position on: [position, number of workers used].
    """

    def __init__(self, prices: Sequence[tuple[StagePrices, int]], many: int, trips: Floats) -> None:
        known = trips[np.isfinite(trips)]
        self._trips, self._step = trips, max(float(known.max(initial=0.0)) / tuning.TRIP_STEPS, 1e-12)
        levels = [
            np.minimum.reduce([each.waiting_load(many, deepest, level * self._step) for each, deepest in prices])
            for level in range(tuning.TRIP_STEPS + 1)
        ]
        self._loads = np.stack(levels, axis=-1)

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> Floats:
        """Seconds [length, number], of the trip rounded down to a step of a table."""
        trips = self._trips[first + 1 : first + 1 + length, numbers]
        level = np.minimum(trips / self._step, tuning.TRIP_STEPS).astype(np.int64)
        return np.take_along_axis(self._loads[kind, first, :length], level, axis=1)
