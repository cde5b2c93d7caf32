"""Placement from the coarse to the fine, with a proven bound: kinds and hosts, then workers.

    paths.py   which kind of worker runs which partitions, host by host: a path, and a bound for all plans
    assignment.py    which workers those are: the links between neighbours at their least

A plan that this finds is a plan of the real workers, priced exactly; the bound comes from the first level alone, and
holds for every plan with one stage a worker.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.bottlenecks import BottleneckSearch
from assigner.solver.fleet.paths import KindPaths
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.fleet.path_program import KindPipeline
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
        self._paths: KindPaths | None = None
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
            paths = self._within(limit)
            while share * low_f <= limit < math.inf and not self._stop():
                if self._tried(paths, share * low_f, share * low_b * tuning.WIDER_LIMIT):
                    return True
                share *= tuning.WIDER_LIMIT
            if paths.prices.longest == self.fleet.n:
                return self._tried(paths, math.inf, math.inf)
            limit *= 2
        return True

    def _tried(self, paths: KindPaths, limit_f: float, limit_b: float) -> bool:
        """Make a plan of the pipeline within two limits, if there is one."""
        found = paths.least(limit_f, limit_b)
        if found is not None:
            self._realise(found)
        return found is not None

    def search(self, seconds: float) -> None:
        """Raise the bound to the target, taking better plans on the way, for so many seconds while there is time."""
        self._clock = SolveClock(seconds, within=self.fleet.table.problem.clock)
        if self._cells is None:
            target = self._target()
            high = self.fleet.highest(target) if math.isfinite(target) else (math.inf, math.inf)
            if high[0] < self.fleet.low[0] or high[1] < self.fleet.low[1]:
                return
            paths = self._within(high[0])
            high = min(high[0], paths.largest[0]), min(high[1], paths.largest[1])
            forward, backward = paths.servers
            self._cells = BottleneckSearch(
                self._swept, self._target, more=self.fleet.more, low=self.fleet.low, high=high, above=target,
                servers=(forward, backward if paths.exact else None),
            )  # fmt: skip

        self._cells.run(self._stop)

    def _stop(self) -> bool:
        """Whether the time is over; a good moment to tell where the search stands."""
        self._watch()
        return self._clock.over

    def _within(self, limit: float) -> KindPaths:
        """Paths that have all intervals up to a limit."""
        if self._paths is None or self.fleet.reach(limit) > self._paths.prices.longest:
            self._paths = KindPaths(self.fleet, limit)
        return self._paths

    def _swept(self, limit_f: float, limit_b: float) -> KindPipeline | None:
        assert self._paths is not None
        found = self._paths.least(limit_f, limit_b)
        if found is not None and self._paths.seconds(found) < self._best * (1 - tuning.BETTER_PATH):
            self._realise(found)
        return found

    def _realise(self, found: KindPipeline) -> None:
        """Make a plan of a pipeline of kinds."""
        paths = self._paths
        assert paths is not None
        self._best = min(self._best, paths.seconds(found))
        groups = WorkerAssignment(paths).line(found.steps, paths.slowest(found.steps))
        options: list[StageOption] = []
        for step, group in zip(found.steps, groups, strict=True):
            paths.real.settle(paths.row[group], step.first, step.length)
            option = paths.real.options.find(step.first, step.first + step.length - 1, group)
            if option is None:
                return
            options.append(option)
        self._price(options)
