"""Placement from the coarse to the fine, with a proven bound: kinds and hosts, then workers.

A plan that this finds is a plan of the real workers, priced exactly; the bound comes from the first level alone, and
holds for every plan with one stage a worker.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.fleet.option_arrays import OptionArrays
    from assigner.solver.fleet.path_program import KindPipeline, KindStage
    from assigner.solver.problem.arrays import Floats
    from assigner.solver.problem.interval_prices import IntervalPrices
    from assigner.solver.problem.stage_options import StageOption


class Hierarchy:
    """The search of one micro-batch count.

    Args:
        price: Takes a pipeline, and says what it takes, in seconds; inf: it cannot be.
        target: Nothing at or above this value is of interest.
    """

    def __init__(
        self, table: IntervalPrices, *, price: Callable[[Sequence[StageOption]], float], target: Callable[[], float],
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

        False: there is no plan at all, however long a step may take.
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
        fleet, clock = self.fleet, self.fleet.table.problem.clock
        if self._prices is None or fleet.reach(limit) > self._prices.longest:
            prices = fleet.prices(limit)
            open_ = np.argwhere(~prices.settled & np.less_equal(prices.forward, limit))
            self._exact = int(open_[:, 2].sum()) <= tuning.SETTLED
            for kind, first, length in open_ if self._exact else ():
                clock.check()
                prices.settle(int(kind), int(first), int(length) + 1)
            self._workers = WorkerAssignment(self.fleet, prices)
            self._prices = prices
        return self._prices

    def _servers(self, prices: OptionArrays) -> tuple[Floats, Floats]:
        """All seconds that a server forward, and backward, can have, sorted; backward, at least, unless `_exact`."""
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
            seconds = found.seconds + self.fleet.more * sum(stages.slowest(found.steps))
            if seconds < self._best * (1 - tuning.BETTER_PATH):
                self._best = seconds
                self._realise(found.steps)
        return found

    def _realise(self, steps: Sequence[KindStage]) -> None:
        """Make a plan of a pipeline of kinds."""
        options: list[StageOption] = []
        for step, group in zip(steps, self._workers.line(steps), strict=True):
            option = self._workers.option(step, group)
            if option is None:
                return
            options.append(option)
        self._price(options)


@dataclass(frozen=True, order=True)
class BottleneckCell:
    """A rectangle of slowest servers, in seconds, with the least sum within the limits that were `swept`."""

    bound: float
    serial: int
    low_f: float
    high_f: float
    low_b: float
    high_b: float
    least: float
    swept: tuple[float, float]


class BottleneckSearch:
    """Branch and bound over two numbers, the slowest server forward and backward: the cells that are open.

    A step takes S + (M - 1) (F + B): a sum over stages and messages, and the slowest servers. With F and B in a cell

        low_f <= F <= high_f,  low_b <= B <= high_b:  step >= least S within the upper limits + (M - 1) (low_f + low_b)

    and the least S is a path, found exactly by a sweep. The cell with the least bound is cut in two until that bound
    reaches the target. What a sweep finds is a pipeline, so good plans come on the way; its own F and B may lie well
    inside the cell.

    Args:
        sweep: Finds the least sum within two limits; None: there is none.
        low: No slowest server forward, backward is below.
        high: No pipeline of interest has one above.
        above: No pipeline with a server above `high` has a lower value.
        servers: All values that a server forward, and backward, can have, sorted; None: any. Cells shrink to them.

    Attributes:
        done: True once the bound is as good as it gets.
    """

    def __init__(
        self, sweep: Callable[[float, float], KindPipeline | None], target: Callable[[], float], *, more: int,
        low: tuple[float, float], high: tuple[float, float], above: float,
        servers: tuple[Floats, Floats | None],
    ) -> None:  # fmt: skip
        self._servers = servers
        self._sweep, self._target, self._more = sweep, target, more
        self._serials = itertools.count(1)
        self._open = [BottleneckCell(0.0, 0, low[0], high[0], low[1], high[1], math.nan, high)]
        self._floor, self.done = above, False

    @property
    def bound(self) -> float:
        """A value that no pipeline within the limits is below, in seconds; inf: there is no pipeline."""
        return min(self._floor, self._open[0].bound) if self._open else self._floor

    def run(self, stop: Callable[[], bool]) -> None:
        """Cut cells until the bound reaches the target, nothing is left to cut, or `stop` says so."""
        while not self.done and not stop():
            if not self._open or self._open[0].bound >= min(self._target(), self._floor):
                self.done = True
                return
            self._cut(self._open[0])
            heapq.heappop(self._open)  # it was the first all the while: its bound held until its parts were there

    def _cut(self, cell: BottleneckCell) -> None:
        """Cut a cell across its longer side; where its limits have come down a good deal, it is swept again first."""
        wide_f, wide_b = cell.high_f - cell.low_f, cell.high_b - cell.low_b
        trimmed_f, trimmed_b = cell.swept[0] - cell.high_f, cell.swept[1] - cell.high_b
        narrow = not self._more or self._more * max(wide_f, wide_b) <= tuning.NARROW_CELL * cell.bound
        if math.isnan(cell.least) or trimmed_f > wide_f or trimmed_b > wide_b or (narrow and trimmed_f + trimmed_b > 0):
            self._look(cell)
        elif narrow:
            self._floor = min(self._floor, cell.bound)
        elif wide_f >= wide_b:
            middle = (cell.low_f + cell.high_f) / 2
            self._put(replace(cell, low_f=middle))
            self._look(replace(cell, high_f=middle))
        else:
            middle = (cell.low_b + cell.high_b) / 2
            self._put(replace(cell, low_b=middle))
            self._look(replace(cell, high_b=middle))

    def _look(self, cell: BottleneckCell) -> None:
        """Sweep a cell, and keep it if there is anything of interest in it."""
        found = None
        if cell.low_f <= cell.high_f and cell.low_b <= cell.high_b:
            found = self._sweep(cell.high_f, cell.high_b)
        if found is not None:
            self._put(replace(cell, least=found.seconds, swept=(cell.high_f, cell.high_b)))

    def _put(self, cell: BottleneckCell) -> None:
        """Keep a cell that was looked at, less what cannot reach the target."""
        target = self._target()
        low_f, low_b = _up(self._servers[0], cell.low_f), _up(self._servers[1], cell.low_b)
        if math.isinf(low_f) or math.isinf(low_b):
            return
        cell = replace(cell, low_f=low_f, low_b=low_b)
        bound = max(cell.bound, cell.least + self._more * (cell.low_f + cell.low_b))
        if bound >= target:
            self._floor = min(self._floor, bound)
            return
        high_f, high_b = cell.high_f, cell.high_b
        if self._more and math.isfinite(target):
            spare = (target - cell.least) / self._more
            high_f, high_b = min(high_f, spare - cell.low_b), min(high_b, spare - cell.low_f)
            if high_f < cell.high_f or high_b < cell.high_b:
                self._floor = min(self._floor, target)
        high_f, high_b = _down(self._servers[0], high_f), _down(self._servers[1], high_b)
        if low_f > high_f or low_b > high_b:
            return
        heapq.heappush(self._open, replace(cell, bound=bound, serial=next(self._serials), high_f=high_f, high_b=high_b))


def _up(values: Floats | None, limit: float) -> float:
    """The least value at or above a limit."""
    if values is None:
        return limit
    at = int(np.searchsorted(values, limit))
    return float(values[at]) if at < len(values) else math.inf


def _down(values: Floats | None, limit: float) -> float:
    """The largest value at or below a limit."""
    if values is None:
        return limit
    at = int(np.searchsorted(values, limit, side="right"))
    return float(values[at - 1]) if at else -math.inf
