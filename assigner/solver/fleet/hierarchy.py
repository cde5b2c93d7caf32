"""Placement from the coarse to the fine, with a proven bound: kinds and hosts, then workers, then cuts.

    paths.py   which kind of worker runs which partitions, host by host: a path, and a bound for all plans
    crew.py    which workers those are: the links between neighbours at their least
    line.py    where to cut between them, exactly, with the links that they have

A plan that this finds is a plan of the real workers, priced exactly; the bound comes from the first level alone, and
holds for every plan with one stage a worker.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from assigner.solver.chain.placement import Placement
from assigner.solver.fleet.cells import Cells
from assigner.solver.fleet.crew import Crew
from assigner.solver.fleet.fleet import Fleet
from assigner.solver.fleet.line import Line
from assigner.solver.fleet.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.fleet.sweep import Found
    from assigner.solver.instance import Instance
    from assigner.solver.segments import Column

START = 3.0
"""Segments up to so many times the slowest server of a perfect split are priced first."""

WIDER = 1.05
"""Ratio of the limits that are tried one after the other until there is a pipeline."""

BETTER = 2e-4
"""A pipeline of kinds is made into a plan if it promises to be better than the last by this share."""

CUTS = 40
"""Sweeps of the cuts between fixed workers, for each plan."""

TELL_S = 0.2
"""Seconds between two calls of `watch`."""

ROUNDING = 1e-9
"""Share by which bounds are lowered: sums are taken in another order here."""


class Hierarchy:
    """The search of one micro-batch count.

    Args:
        instance: What is to be placed.
        take: Told of every plan.
        target: Nothing at or above this value is of interest.
        watch: Called between sweeps.
    """

    def __init__(
        self, instance: Instance, *, take: Callable[[Placement], None], target: Callable[[], float],
        watch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.fleet = Fleet(instance)
        self._instance, self._take = instance, take
        self._wanted = target
        self._watch, self._watched = watch, time.monotonic()
        self._paths: Paths | None = None
        self._cells: Cells | None = None
        self._best = self._until = math.inf

    def _target(self) -> float:
        return self._wanted() * (1 + 2 * ROUNDING)

    @property
    def bound(self) -> float:
        """No plan is faster, in seconds; inf: there is none."""
        cells = 0.0 if self._cells is None else self._cells.bound
        return max(self.fleet.quick_bound, cells) * (1 - ROUNDING)

    @property
    def done(self) -> bool:
        """True once the bound is as good as it gets here."""
        return self._cells is not None and self._cells.done

    def start(self, until: float) -> bool:
        """Look for a first plan: limits on the slowest servers widen until there is a pipeline within them.

        Returns:
            False where there is no plan at all, however long a step may take.
        """
        (low_f, low_b), share, self._until = self.fleet.low, WIDER, until
        limit = START * low_f if self.fleet.more and low_f else math.inf
        while not self._stop():
            paths = self._within(limit)
            while share * low_f <= limit < math.inf and not self._stop():
                if self._tried(paths, share * low_f, share * low_b * WIDER):
                    return True
                share *= WIDER
            if paths.prices.table.longest == self.fleet.n:
                return self._tried(paths, math.inf, math.inf)
            limit *= 2
        return True

    def _tried(self, paths: Paths, limit_f: float, limit_b: float) -> bool:
        """Make a plan of the pipeline within two limits, if there is one."""
        found = paths.least(limit_f, limit_b)
        if found is not None:
            self._realise(found)
        return found is not None

    def search(self, until: float) -> None:
        """Raise the bound to the target, taking better plans on the way, as long as there is time."""
        self._until = until
        if self._cells is None:
            target = self._target()
            high = self.fleet.highest(target) if math.isfinite(target) else (math.inf, math.inf)
            if high[0] < self.fleet.low[0] or high[1] < self.fleet.low[1]:
                return
            paths = self._within(high[0])
            high = min(high[0], paths.largest[0]), min(high[1], paths.largest[1])
            self._cells = Cells(
                self._swept, self._target, more=self.fleet.more, low=self.fleet.low, high=high, above=target,
                servers=paths.servers,
            )  # fmt: skip

        self._cells.run(self._stop)

    def _stop(self) -> bool:
        """Whether the time is over; a good moment to tell where the search stands."""
        now = time.monotonic()
        if self._watch is not None and now - self._watched > TELL_S:
            self._watched = now
            self._watch()
        return now > self._until

    def _within(self, limit: float) -> Paths:
        """Paths that have all segments up to a limit."""
        if self._paths is None or self.fleet.reach(limit) > self._paths.prices.table.longest:
            self._paths = Paths(self.fleet, limit)
        return self._paths

    def _swept(self, limit_f: float, limit_b: float) -> Found | None:
        assert self._paths is not None
        found = self._paths.least(limit_f, limit_b)
        if found is not None and self._paths.seconds(found) < self._best * (1 - BETTER):
            self._realise(found)
        return found

    def _realise(self, found: Found) -> None:
        """Make a plan of a pipeline of kinds: workers, then cuts."""
        paths = self._paths
        assert paths is not None
        self._best = min(self._best, paths.seconds(found))
        groups = Crew(paths).line(found.steps, paths.slowest(found.steps))
        value = self._placed(found, groups)
        if paths.exact and all(len(kind.groups) == 1 for kind in self.fleet.kinds):
            return  # the path is the plan
        self._cut(groups, value)

    def _placed(self, found: Found, groups: Sequence[int]) -> float:
        """Price and take a pipeline; its step time, inf if it cannot be."""
        paths = self._paths
        assert paths is not None
        columns: list[Column] = []
        for step, group in zip(found.steps, groups, strict=True):
            paths.real.settle(paths.row[group], step.first, step.length)
            column = paths.real.table.column(step.first, step.first + step.length - 1, group)
            if column is None:
                return math.inf
            columns.append(column)
        placement = Placement.of(self._instance, columns)
        self._take(placement)
        return placement.step_s

    def _cut(self, groups: Sequence[int], value: float) -> None:
        """Better cuts between the same workers."""
        paths, best = self._paths, value
        assert paths is not None
        line = Line(paths, groups)

        def sweep(limit_f: float, limit_b: float) -> Found | None:
            nonlocal best
            cut = line.least(limit_f, limit_b)
            if cut is not None and line.seconds(cut) < best * (1 - BETTER):
                best = min(best, self._placed(cut, groups))
            return cut

        high = self.fleet.highest(best) if math.isfinite(best) else paths.largest
        cells = Cells(sweep, lambda: best * (1 - BETTER), more=self.fleet.more, low=self.fleet.low, high=high)
        left = iter(range(CUTS))
        cells.run(lambda: next(left, None) is None or self._stop())
