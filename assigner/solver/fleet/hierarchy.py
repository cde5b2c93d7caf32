"""Placement from the coarse to the fine, with a proven bound: kinds and hosts, then workers.

    relaxation.py    which kind of worker runs which partitions, host by host: a path, and a bound for all plans
    assignment.py    which workers those are: the links between neighbours at their least

A plan that this finds is a plan of the real workers, priced exactly; the bound comes from the first level alone, and
holds for every plan with one stage a worker.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.bottlenecks import BottleneckSearch
from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.fleet.path_program import KindPipeline, KindStage
    from assigner.solver.problem.arrays import Floats
    from assigner.solver.problem.prices import PriceTable
    from assigner.solver.problem.stage_options import StageOption


class Hierarchy:
    """The search of one micro-batch count.

    Args:
        table: What is to be placed.
        price: Takes a pipeline, and says what it takes, in seconds; inf: it cannot be.
        target: Nothing at or above this value is of interest.
        watch: Called between sweeps.
    """

    def __init__(
        self, table: PriceTable, *, price: Callable[[Sequence[StageOption]], float], target: Callable[[], float],
        watch: Callable[[], None],
    ) -> None:  # fmt: skip
        self.fleet = KindRelaxation(table)
        self._price = price
        self._wanted = target
        self._clock = table.problem.clock
        self._watch = watch
        self._prices: OptionArrays | None = None
        self._cells: BottleneckSearch | None = None
        self._best = math.inf

    def _target(self) -> float:
        """Of bounds that are lowered by rounding: here, sums are taken in another order."""
        return self._wanted() * (1 + 2 * ROUNDING)

    @property
    def bound(self) -> float:
        """No plan is faster, in seconds; inf: there is none."""
        cells = 0.0 if self._cells is None else self._cells.bound
        return max(self.fleet.quick_bound, cells) * (1 - ROUNDING)

    def start(self) -> bool:
        """Look for a first plan: limits on the slowest servers widen until there is a pipeline within them.

        Returns:
            False where there is no plan at all, however long a step may take.
        """
        (low_f, low_b), share = self.fleet.low, tuning.WIDER_LIMIT
        limit = tuning.START_LIMIT * low_f if self.fleet.more and low_f else math.inf
        while not self._stop():
            prices = self._within(limit)
            while share * low_f <= limit < math.inf and not self._stop():
                if self._path(share * low_f, share * low_b * tuning.WIDER_LIMIT):
                    return True
                share *= tuning.WIDER_LIMIT
            if prices.longest == self.fleet.n:
                return self._path(math.inf, math.inf) is not None
            limit *= 2
        return True

    def search(self, seconds: float) -> None:
        """Raise the bound to the target, taking better plans on the way, for so many seconds while there is time."""
        self._clock = SolveClock(seconds, within=self.fleet.table.problem.clock)
        if self._cells is None:
            target = self._target()
            high = self.fleet.highest(target) if math.isfinite(target) else (math.inf, math.inf)
            if high[0] < self.fleet.low[0] or high[1] < self.fleet.low[1]:
                return
            prices = self._within(high[0])
            forward, backward = self._servers(prices)
            high = min(high[0], float(forward.max(initial=0.0))), min(high[1], float(backward.max(initial=0.0)))
            self._cells = BottleneckSearch(
                self._path, self._target, more=self.fleet.more, low=self.fleet.low, high=high, above=target,
                servers=(forward, backward if self._exact else None),
            )  # fmt: skip
        self._cells.run(self._stop)

    def _stop(self) -> bool:
        """Whether the time is over; a good moment to tell where the search stands."""
        self._watch()
        return self._clock.over

    def _within(self, limit: float) -> OptionArrays:
        """Prices of all intervals up to a limit on the slowest server forward, in seconds, by kind of worker."""
        fleet, table = self.fleet, self.fleet.table
        if self._prices is None or fleet.reach(limit) > self._prices.longest:
            prices = OptionArrays(table, fleet.kinds, fleet.reach(limit), fleet.links)
            open_ = np.argwhere(~prices.settled & np.less_equal(prices.forward, limit))
            self._exact = int(open_[:, 2].sum()) <= tuning.SETTLED
            for kind, first, length in open_ if self._exact else ():
                table.problem.clock.check()
                prices.settle(int(kind), int(first), int(length) + 1)
            self._real, self._row = prices.by_worker()
            self._prices = prices
        return self._prices

    def _servers(self, prices: OptionArrays) -> tuple[Floats, Floats]:
        """All seconds that a server forward, and backward, can have, sorted; backward, bounds unless `_exact`."""
        every = (prices.stages, *self.fleet.sweep.boundaries)
        forward, backward = (
            np.unique(np.concatenate([each[np.isfinite(each)] for each in servers]))
            for servers in ([each.forward for each in every], [each.backward for each in every])
        )
        return forward, backward

    def _path(self, limit_f: float, limit_b: float) -> KindPipeline | None:
        """The path with the least sum of which no server is above its limit, made a plan where that is better."""
        assert self._prices is not None
        stages = self._prices.stages
        found = self.fleet.sweep.least(stages, limit_f, limit_b)
        if found is not None:
            slowest = stages.slowest(found.steps)
            seconds = found.seconds + self.fleet.more * sum(slowest)
            if seconds < self._best * (1 - tuning.BETTER_PATH):
                self._best = seconds
                self._realise(found.steps, slowest)
        return found

    def _realise(self, steps: Sequence[KindStage], slowest: tuple[float, float]) -> None:
        """Make a plan of a pipeline of kinds, of which the slowest stages forward and backward take so many seconds."""
        groups = WorkerAssignment(self.fleet, self._real, self._row).line(steps, slowest)
        options: list[StageOption] = []
        for step, group in zip(steps, groups, strict=True):
            self._real.settle(self._row[group], step.first, step.length)
            option = self._real.options.find(step.first, step.first + step.length - 1, group)
            if option is None:
                return
            options.append(option)
        self._price(options)
