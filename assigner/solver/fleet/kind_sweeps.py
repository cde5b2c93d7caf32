"""1F1B chains of any size: one sweep over workers taken by kind has a bound of all plans, and a pipeline near the best.

    step         no stage starts before those in front of it have run a forward, and behind its last backward theirs
                 follows: at least the largest, over the stages, of the seconds of one forward and one backward in front
                 of it + M (forward + backward) of its own, which the path program finds (`loads`)
    throughput   M times the slowest worker or link: by halving, the least limit within which there is a pipeline
    latency      the least sum of forwards

Where a plan of T seconds is at hand, more is known of the steps that are shorter: the trip from a stage to the last one
and back, of R seconds, is made T / R times at most, so that the stage keeps M / floor(T / R) micro-batches in flight or
more, and rematerialises what does not fit then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.fleet.path_program import ServerPrices
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.terms import Objective
    from assigner.solver.fleet.path_program import KindPipeline
    from assigner.solver.problem.arrays import Floats
    from assigner.solver.problem.prices import PriceTable


class _LoadPrices(NamedTuple):
    """What intervals take.

    Args:
        arrays: They, priced.
        servers: As servers: seconds of a micro-batch.
        loads: Seconds of a step in which they keep their worker busy.
    """

    arrays: OptionArrays
    servers: ServerPrices
    loads: Floats


class KindSweeps:
    """The sweeps of one micro-batch count, over a chain.

    Args:
        table: What is to be placed.
        objective: What is made small: "step", "throughput" or "latency".
        place: Takes where each stage starts, with the group of its worker.
    """

    def __init__(
        self, table: PriceTable, objective: Objective, *, place: Callable[[Sequence[tuple[int, int]]], object]
    ) -> None:
        self._table, self._objective, self._place = table, objective, place
        self._many = table.micro_batches
        self._fleet = KindRelaxation(table, server="forward" if objective == "latency" else "both")
        self._handed: set[tuple[tuple[int, int], ...]] = set()

    def bound(self, below: float) -> float:
        """What no plan is below; the pipelines that say so are handed on.

        Args:
            below: Plans of this value or more are of no interest; inf: any is.

        Returns:
            A value, no more than `below`.

        Raises:
            OutOfTime: the time is over.
        """
        if self._objective == "throughput":
            return self._least_limit(below)
        limit = below * (1 + ROUNDING) / self._many if self._objective == "step" else math.inf
        prices = self._prices(below, limit)
        loads = prices.loads if self._objective == "step" else None
        found = self._fleet.sweep.least(prices.servers, limit, limit, loads=loads)
        if found is None:
            return below
        self._realise(prices, found)
        return min(below, found.seconds * (1 - ROUNDING))

    def _least_limit(self, below: float) -> float:
        """As `bound`, of throughput."""
        low, high, best = self._fleet.level, below / self._many, None
        prices = self._prices(math.inf, high)
        while high > low * tuning.NEAR_LIMIT and low:
            limit = low * tuning.START_LIMIT if math.isinf(high) else math.sqrt(low * high)
            found = self._fleet.sweep.least(prices.servers, limit, limit)
            if found is None:
                low = limit
            else:
                best, high = found, limit
        if best is not None:
            self._realise(prices, best)
        return min(below, self._many * low * (1 - ROUNDING))

    def start(self, below: Callable[[], float], near: float) -> None:
        """Hand on pipelines of least sum whose stages stay within a limit, one after the other; for the step alone.

        Of those that are as good by their bound, these keep stages that are not the slowest short, too.

        Args:
            below: Plans of so many seconds or more are of no interest, by now.
            near: What a plan is thought to take: by that stages keep so many micro-batches.

        Raises:
            OutOfTime: the time is over.
        """
        fleet, more, limit = self._fleet, self._many - 1, self._fleet.level
        if self._objective != "step":
            return
        most, prices = 0.0, None
        while more and limit and fleet.sums + more * limit < below():
            if prices is None or limit > most:  # long intervals are priced only where nothing else is left
                most = min(tuning.START_LIMIT * limit, below() / self._many)
                prices = self._prices(near, most)
            found = fleet.sweep.least(prices.servers, limit, limit)
            if found is not None:
                self._realise(prices, found)
                limit = max(limit, prices.servers.slowest(found.steps)[0])
            limit *= tuning.WIDER_LIMIT

    def _prices(self, below: float, limit: float) -> _LoadPrices:
        """Of all intervals whose worker has no more than `limit` seconds to do for a micro-batch."""
        fleet, is_step = self._fleet, self._objective == "step"
        arrays = OptionArrays(self._table, fleet.kinds, fleet.reach(limit), fleet.links, self._in_flight(below))
        both, stages = arrays.forward + arrays.backward, arrays.stages
        busy = np.where(np.isfinite(both), stages.forward + stages.backward, 0.0) - np.where(
            np.isfinite(both), both, 0.0
        )
        loads: Floats = self._many * both + (self._many - is_step) * busy
        seconds = arrays.forward if self._objective == "latency" else stages.seconds
        servers = ServerPrices(seconds, loads / self._many, np.zeros_like(loads))
        loads[:, 0] += arrays.update[:, 0]
        return _LoadPrices(arrays, servers, loads)

    def _in_flight(self, below: float) -> Floats:
        """Micro-batches that a stage keeps at least in a plan below some seconds, by its first position."""
        if math.isinf(below) or self._objective != "step":
            return np.ones(self._fleet.n)
        trips = np.maximum(self._fleet.trips, below / self._many / 2)  # with shorter ones, one is enough
        rounds = np.maximum(np.floor(below / trips * (1 + ROUNDING)), 1)
        return np.ceil(self._many / rounds)

    def _realise(self, prices: _LoadPrices, found: KindPipeline) -> None:
        """Hand on the workers' line for a pipeline of kinds."""
        slowest = prices.arrays.stages.slowest(found.steps)
        groups = WorkerAssignment(self._fleet, *prices.arrays.by_worker()).line(found.steps, slowest)
        line = tuple((step.first, group) for step, group in zip(found.steps, groups, strict=True))
        if line not in self._handed:
            self._handed.add(line)
            self._place(line)
