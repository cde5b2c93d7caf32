"""1F1B chains of any size: one sweep over workers taken by kind has a bound of all plans, and a pipeline near the best.

    step         no stage starts before those in front of it have run a forward, and behind its last backward theirs
                 follows: at least the largest, over the stages, of the seconds of one forward and one backward in front
                 of it + what a step takes from its first forward to its last backward (`StepLoads`), which the path
                 program finds. For a bound by the least trip that can lie behind the stage, for plans at warm-ups that
                 hide about that trip.
    throughput   M times the slowest worker or link: by halving, the least limit within which there is a pipeline
    latency      the least sum of forwards

Workers count by their kind, as fleet/relaxation.py takes them.
"""

from __future__ import annotations

import functools
import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.option_arrays import OptionArrays, known
from assigner.solver.fleet.path_program import ServerPrices
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.terms import Objective
    from assigner.solver.fleet.path_program import KindPipeline, LeastTrips
    from assigner.solver.problem.arrays import Floats, Ints
    from assigner.solver.problem.interval_prices import IntervalPrices


class KindSweeps:
    """The sweeps of one micro-batch count, over a chain; OutOfTime where the time is over.

    Args:
        place: Takes pipelines that are worth a look: where each stage starts, with the group of its worker, and the
            micro-batches in flight that would do; none: nothing is said of them.
    """

    def __init__(
        self, table: IntervalPrices, objective: Objective, *,
        place: Callable[[Sequence[tuple[int, int]], tuple[int, ...]], object], large: bool = False,
    ) -> None:  # fmt: skip
        self._table, self._objective, self._place, self._large = table, objective, place, large
        self._many, self._last = table.micro_batches, (math.inf, 0.0)
        self._fleet = KindRelaxation(table, server="forward" if objective == "latency" else "both")
        self._handed: set[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = set()

    def bound(self, below: float) -> float:
        """What no plan is below, no more than `below`; the pipelines that say so are handed on.

        Raises:
            OutOfTime: the time is over.
        """
        if below > self._last[0] * tuning.NEAR_TARGET:
            return min(below, self._last[1])
        self._last = below, self._least_limit(below) if self._objective == "throughput" else self._least(below)
        return self._last[1]

    def _least(self, below: float) -> float:
        """As `bound`, of the step and of latency."""
        limit = below * (1 + ROUNDING) / self._many if self._objective == "step" else math.inf
        prices = self._prices(limit)
        servers, loads = self._servers(prices), None
        if self._objective == "step":
            trips = self._fleet.sweep.trips(servers, limit, limit)
            least, most = zip(*self._bands, strict=True)
            loads = StepLoads([self._prices(limit, each) for each in least], most, trips)
        found = self._fleet.sweep.least(servers, limit, limit, loads=loads)
        if found is None:
            return below
        self._realise(prices, found)
        return min(below, found.seconds * (1 - ROUNDING))

    @cached_property
    def _bands(self) -> list[tuple[int, int]]:
        """Depths that are priced as one, the least and the most of each."""
        least, bands, wider = 1, [], tuning.DEPTH_BANDS[self._large]
        while least < self._many:
            most = min(self._many - 1, max(least, int(least * wider)))
            bands.append((least, most))
            least = most + 1
        return [*bands, (self._many, self._many)]

    def _least_limit(self, below: float) -> float:
        """As `bound`, of throughput."""
        low, high, best = self._fleet.work.level, below / self._many, None
        prices = self._prices(high)
        servers = self._servers(prices)
        while high > low * tuning.NEAR_LIMIT and low:
            limit = low * tuning.START_LIMIT if math.isinf(high) else math.sqrt(low * high)
            found = self._fleet.sweep.least(servers, limit, limit)
            if found is None:
                low = limit
            else:
                best, high = found, limit
        if best is not None:
            self._realise(prices, best)
        return min(below, self._many * low * (1 - ROUNDING))

    def start(self, below: Callable[[], float]) -> None:
        """Hand on a pipeline for each of several warm-up depths, with these, below a value; for the step alone.

        A stage with n stages behind it keeps 1 + a n micro-batches in flight: a = 1 is the schedule's own.

        Raises:
            OutOfTime: the time is over.
        """
        if self._objective != "step":
            return
        wide, wider = self._fleet.work.level * tuning.START_LIMIT, tuning.WIDER_STARTS
        for more in tuning.DEEPER[: 1 if self._large else None]:
            limit = below() * (1 + ROUNDING) / self._many
            while not self._start(limit if math.isfinite(limit) else wide, more) and math.isinf(limit):
                if not wider:  # nothing fits at the least depth: deeper ones take more memory
                    return
                wide, wider = wide * tuning.START_LIMIT, wider - 1

    def _start(self, limit: float, more: float) -> bool:
        """As `start`, of servers of no more than `limit` seconds, and of one a; whether there is a pipeline."""
        prices, many = self._prices(limit), self._many
        servers = self._servers(prices)
        trips = self._fleet.sweep.trips(servers, limit, limit)
        behind = np.maximum(np.arange(trips.workers.max() + 1) - 1, 0)
        deepest = np.array([most for _, most in self._bands])
        depths = deepest[np.searchsorted(deepest, np.minimum(1 + np.ceil(more * behind), many))]
        each, which = np.unique(depths[trips.workers], return_inverse=True)
        loads = StepLoads([self._prices(limit, depth) for depth in each.tolist()], each.tolist(), trips, which)
        found = self._fleet.sweep.least(servers, limit, limit, loads=loads)
        if found is not None:
            self._realise(prices, found, depths[len(found.steps) : 0 : -1].tolist())
        return found is not None

    def _prices(self, limit: float, in_flight: int = 1) -> OptionArrays:
        """Of all intervals whose worker has no more than `limit` seconds to do for a micro-batch."""
        fleet = self._fleet
        return OptionArrays(self._table, fleet.kinds, fleet.reach(limit), fleet.links, in_flight)

    def _servers(self, prices: OptionArrays) -> ServerPrices:
        """What a sweep adds up, and the seconds of a micro-batch that are held to limits."""
        seconds = prices.forward if self._objective == "latency" else prices.stages.seconds
        last = self._objective == "step"  # nothing waits for what the last messages of a step keep busy
        pace = prices.forward + prices.backward + sum(prices.busy) * (self._many - last) / self._many
        return ServerPrices(seconds, pace, np.zeros_like(pace))

    def _realise(self, prices: OptionArrays, found: KindPipeline, depths: Sequence[int] = ()) -> None:
        """Hand on the workers' line for a pipeline of kinds."""
        groups = WorkerAssignment(self._fleet, prices).line(found.steps)
        line = [(step.first, group) for step, group in zip(found.steps, groups, strict=True)]
        key = tuple(line), tuple(depths)
        if key not in self._handed:
            self._handed.add(key)
            self._place(line, tuple(depths))


class StepLoads:
    """How long a step keeps stages from their first forward to their last backward, by the trip that lies behind them.

    At the depth given, for plans; at any, for bounds. Before its first backward a stage runs as many forwards as it
    keeps in flight, and behind its last forward as many backwards. What a micro-batch is away for, from the end of its
    forward to the beginning of its backward, is the trip: if that takes longer than these, the stage waits. With w of M
    micro-batches in flight, f, b the seconds of one forward and one backward and R those of the trip, a step takes no
    less than the largest of

        M (f + b) + max(0, R - (w - 1) f) + max(0, R - (w - 1) b)         w < M
        R + f + b + (M - 1) max(f, b)                                     w = M: all forwards are behind it by then
        ceil(M / w) (R + f + b)                                           no more than w are on the way at once

    More in flight hides a longer trip, and takes memory, or the seconds of what is run again for want of it.

    Args:
        stages: Their prices at several depths.
        depths: Micro-batches in flight: the most that each of these stands for.
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
        """Seconds [length, number] that a step takes for stages of up to so many partitions, and those behind them.

        By the numbers of workers used from the stage on, with it.
        """
        trips = self._trips.seconds[first + 1 : first + 1 + length]
        loads = (self._with_waits(kind, first, each, trips) for each in self._chosen)
        least: Floats = functools.reduce(np.minimum, loads)
        return least[:, self._trips.alike[numbers]]

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
