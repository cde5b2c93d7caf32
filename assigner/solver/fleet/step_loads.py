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
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.option_arrays import known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.fleet.option_arrays import OptionArrays
    from assigner.solver.fleet.path_program import LeastTrips
    from assigner.solver.problem.arrays import Floats, Ints


class StepLoads:
    """Loads of stages by the trip that lies behind them, at the depth given, for plans; at any, for bounds.

    Args:
        stages: Their prices at several depths.
        depths: Micro-batches in flight: the most that each of these stands for.
        trips: The least that lies behind.
        chosen: Number of the depth, by what counts as one number of workers in `trips`; None: of the least load.
    """

    def __init__(
        self, stages: Sequence[OptionArrays], depths: Sequence[int], trips: LeastTrips, chosen: Ints | None = None
    ) -> None:
        self._many, self._depths = stages[0].table.micro_batches, np.array(depths)
        self._trips = trips
        self._chosen: Sequence[Ints | int] = range(len(depths)) if chosen is None else [chosen]
        forward, backward = (
            np.stack([known(getattr(each, way)) for each in stages]) for way in ("forward", "backward")
        )
        busy_f, busy_b = (np.stack([each.busy[way] for each in stages]) for way in (0, 1))
        self._prices = np.stack(
            [np.stack([each.load for each in stages]), forward, backward, forward + busy_f, backward + busy_b]
        )

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> Floats:
        """As `StageLoads`."""
        trips = self._trips.behind(first, length)
        loads = (self._with_waits(kind, first, each, trips) for each in self._chosen)
        return self._trips.each(functools.reduce(np.minimum, loads), numbers)

    def _with_waits(self, kind: int, first: int, numbers: Ints | int, trips: Floats) -> Floats:
        """Seconds [length, trip] of stages from a position on, each with its own trip behind it and depth's number."""
        load, forward, backward, pace_f, pace_b = (
            each.T.reshape(len(trips), -1) for each in self._prices[:, numbers, kind, first, : len(trips)]
        )
        many, deepest, trip_f = self._many, self._depths[numbers], trips + forward
        turns = trip_f + backward + (many - 1) * np.maximum(pace_f, pace_b)
        idle = np.maximum(0.0, trip_f - deepest * pace_f) + np.maximum(0.0, trip_f - pace_f - (deepest - 1) * pace_b)
        rounds = np.maximum(load + idle, np.ceil(many / deepest) * (trip_f + backward))
        found: Floats = np.where(deepest < many, rounds, np.maximum(load, turns))
        return found
