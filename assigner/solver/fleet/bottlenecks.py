"""Branch and bound over two numbers: the slowest server forward and backward.

A step takes S + (M - 1) (F + B): a sum over its stages and messages, and the slowest servers. With F and B in a cell

    low_f <= F <= high_f,  low_b <= B <= high_b:      step >= least S within the upper limits + (M - 1) (low_f + low_b)

and the least S is a path, found exactly by a sweep. The cell with the least bound is cut in two until that bound
reaches the target. What a sweep finds is a pipeline, so good plans come on the way; its own F and B may lie well
inside the cell.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.limits import tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.solver.fleet.path_program import KindPipeline
    from assigner.solver.problem.arrays import Floats


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
    """The cells that are open.

    Args:
        sweep: Finds the least sum within two limits; None: there is none.
        target: Nothing at or above this value is of interest.
        more: M - 1.
        low: No slowest server forward, backward is below.
        high: No pipeline of interest has one above.
        above: No pipeline with a server above `high` has a lower value.
        servers: All values that a server forward, and backward, can have, sorted; None: any. Cells shrink to them.

    Attributes:
        done: True once the bound is as good as it gets.
    """

    def __init__(
        self, sweep: Callable[[float, float], KindPipeline | None], target: Callable[[], float], *, more: int,
        low: tuple[float, float], high: tuple[float, float], above: float = math.inf,
        servers: tuple[Floats | None, Floats | None] = (None, None),
    ) -> None:  # fmt: skip
        self._servers = servers
        self._sweep, self._target, self._more = sweep, target, more
        self._serials = itertools.count(1)
        self._open = [BottleneckCell(0.0, 0, low[0], high[0], low[1], high[1], math.nan, high)]
        self._floor, self._at_work = above, math.inf
        self.done = False

    @property
    def bound(self) -> float:
        """A value that no pipeline within the limits is below, in seconds; inf: there is no pipeline."""
        waiting = self._open[0].bound if self._open else math.inf
        return min(self._floor, self._at_work, waiting)

    def run(self, stop: Callable[[], bool]) -> None:
        """Cut cells until the bound reaches the target, nothing is left to cut, or `stop` says so."""
        while not self.done and not stop():
            if not self._open or self._open[0].bound >= min(self._target(), self._floor):
                self.done = True
                return
            cell = self._open[0]
            self._at_work = cell.bound
            heapq.heappop(self._open)
            self._cut(cell)
            self._at_work = math.inf

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
