"""1F1B chains of any size: sweeps over workers taken by kind have a bound of all plans, and pipelines near the best.

    step         no stage starts before those in front of it have run a forward, and behind its last backward theirs
                 follows: at least the largest, over the stages, of the seconds of one forward and one backward in front
                 of it + what a step takes from its first forward to its last backward (`StepPrices`), which the path
                 program finds. For a bound by the least trip that can lie behind the stage, in one sweep, and in cells
                 of pipelines whose waits are about as long (`StepCells`); for plans at warm-ups that hide about that
                 trip.
    throughput   M times the slowest worker or link: by halving, the least limit within which there is a pipeline
    latency      the least sum of forwards

Workers count by their kind, as fleet/relaxation.py takes them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.fleet.assignment import WorkerAssignment
from assigner.solver.fleet.option_arrays import known
from assigner.solver.fleet.path_program import LeastTrips, ServerPrices
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.terms import Objective
    from assigner.solver.fleet.option_arrays import OptionArrays
    from assigner.solver.fleet.path_program import KindPipeline, KindStage, PathProgram
    from assigner.solver.problem.arrays import Flags, Floats, Ints
    from assigner.solver.problem.interval_prices import IntervalPrices


class KindSweeps:
    """The sweeps of one micro-batch count, over a chain; OutOfTime where the time is over.

    Args:
        place: Takes pipelines that are worth a look: where each stage starts, with the group of its worker, and the
            micro-batches in flight that would do; none: nothing is said of them.
    """

    def __init__(
        self, table: IntervalPrices, objective: Objective, *,
        place: Callable[[Sequence[tuple[int, int]], tuple[int, ...]], object],
    ) -> None:  # fmt: skip
        self._objective, self._place, self._many = objective, place, table.micro_batches
        self._large = table.visits > tuning.MOST_VISITS
        self._asked, self._known = math.inf, 0.0
        self._cells: StepCells | None = None
        self._fleet = KindRelaxation(table, server="forward" if objective == "latency" else "both")
        self._handed: set[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = set()

    @property
    def known(self) -> float:
        """What no plan is below, as far as that has been asked for."""
        return self._known if self._cells is None else max(self._known, self._cells.bound)

    @property
    def done(self) -> bool:
        """Whether more looks tell no more."""
        return self._cells is None or self._cells.done

    def bound(self, below: float, looks: int = 0) -> float:
        """What no plan is below, no more than `below`; the pipelines that say so are handed on.

        `looks` are sweeps for more than the first one tells, of the step.

        Raises:
            OutOfTime: the time is over; `known` has what was found until then.
        """
        if not below > self._asked * tuning.NEAR_TARGET:
            self._asked, self._known = below, self.known
            if self._objective == "step":
                self._cells, looks = self._step_cells(below), max(1, looks)
            else:
                found = self._least_limit(below) if self._objective == "throughput" else self._least_sum(below)
                self._known = max(self._known, found)
        if self._cells is not None:
            self._cells.run(below, looks)
        return min(below, self.known)

    def _step_cells(self, below: float) -> StepCells:
        """What bounds the step, of plans below a value."""
        limit, sweep = below * (1 + ROUNDING) / self._many, self._fleet.sweep
        prices = self._fleet.prices(limit, 1)
        least, most = zip(*self._bands, strict=True)
        stages = StepPrices([self._fleet.prices(limit, each) for each in least], most)
        hops = np.minimum.reduce([each.seconds for each in sweep.boundaries])

        def place(found: KindPipeline) -> None:
            behind = [
                float(hops[right.first, left.kind, right.kind]) for left, right in itertools.pairwise(found.steps)
            ]
            self._realise(prices, found, stages.depths(found.steps, [0.0, *behind], found.seconds))

        return StepCells(sweep, stages, self._servers(prices), limit=limit, below=below, place=place)

    def _least_sum(self, below: float) -> float:
        """As `bound`, of latency."""
        prices = self._fleet.prices(math.inf, 1)
        found = self._fleet.sweep.least(self._servers(prices), math.inf, math.inf)
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
        prices = self._fleet.prices(high, 1)
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
        prices, many = self._fleet.prices(limit, 1), self._many
        servers = self._servers(prices)
        trips = self._fleet.sweep.trips(servers, limit, limit)
        behind = np.maximum(np.arange(sum(self._fleet.counts) + 1) - 1, 0)
        deepest = np.array([most for _, most in self._bands])
        depths = deepest[np.searchsorted(deepest, np.minimum(1 + np.ceil(more * behind), many))]
        each, which = np.unique(depths[trips.workers], return_inverse=True)
        stages = StepPrices([self._fleet.prices(limit, depth) for depth in each.tolist()], each.tolist())
        loads = StepLoads(stages, trips, which)
        found = self._fleet.sweep.least(servers, limit, limit, loads=loads)
        if found is not None:
            self._realise(prices, found, depths[len(found.steps) : 0 : -1].tolist())
        return found is not None

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


class _Terms(NamedTuple):
    """What a step takes of stages at several depths, in seconds, as `StepPrices` has it: L is the largest of its terms.

    Args:
        own: What the stage adds to the sum: one forward, one backward, the update.
        flat: L where the whole trip is hidden.
        once, twice, rounds: What is beside a trip that counts once, at both ends of the stage, or in every round.
        least: G where it is least.
    """

    own: Floats
    flat: Floats
    once: Floats
    twice: Floats
    rounds: Floats
    least: Floats

    def loads(self, slopes: Floats, trips: Floats) -> tuple[Floats, Floats]:
        """L, and the largest of its lines that grow by more than the trip does, but where a depth has none."""
        steep = np.maximum(self.twice + slopes[0] * trips, self.rounds + slopes[1] * trips)
        return np.maximum(np.maximum(self.flat, self.once + trips), steep), steep


class StepPrices:
    """What a step keeps stages from their first forward to their last backward, at several depths, by the trip behind.

    Before its first backward a stage runs as many forwards as it keeps in flight, and behind its last forward as many
    backwards. What a micro-batch is away for, from the end of its forward to the beginning of its backward, is the
    trip: if that takes longer than these, the stage waits. With w of M micro-batches in flight, f, b the seconds of one
    forward and one backward and R those of the trip, a step takes no less than the largest of

        M (f + b) + max(0, R - (w - 1) f) + max(0, R - (w - 1) b)         w < M
        R + f + b + (M - 1) max(f, b)                                     w = M: all forwards are behind it by then
        ceil(M / w) (R + f + b)                                           no more than w are on the way at once

    and behind it the update, of the first stage. More in flight hides a longer trip, and takes memory, or the seconds
    of what is run again for want of it. That L(R) is the largest of a constant and of lines a + c R with c >= 1. What
    lies in front of a stage takes the pipeline's whole sum S less R + f + b, so that the step is no less than S + G,

        G(R) = L(R) - R - (f + b)

    which has its least where the first line meets the constant, and grows from there on.

    Args:
        stages: Their prices at several depths.
        depths: Micro-batches in flight, ascending: the most that each of these stands for.
    """

    def __init__(self, stages: Sequence[OptionArrays], depths: Sequence[int]) -> None:
        many = stages[0].table.micro_batches
        self._depths = np.array(depths)
        deep = self._depths[:, None, None, None]
        forward, backward = (
            np.stack([known(getattr(each, way)) for each in stages]) for way in ("forward", "backward")
        )
        busy_f, busy_b = (np.stack([each.busy[way] for each in stages]) for way in (0, 1))
        pace_f, pace_b = forward + busy_f, backward + busy_b
        both, update = forward + backward, np.stack([known(each.update) for each in stages])
        update[:, :, 1:] = 0.0
        load, own = np.stack([each.load for each in stages]), both + update
        missing, load = ~np.isfinite(load), known(load)
        idle_f, idle_b = forward - deep * pace_f, forward - pace_f - (deep - 1) * pace_b
        full, rounds = deep >= many, np.ceil(many / deep)
        turns = both + (many - 1) * np.maximum(pace_f, pace_b) + update
        lines = [
            np.where(full, turns, each)
            for each in (load + np.maximum(idle_f, idle_b), load + idle_f + idle_b, rounds * both + update)
        ]
        slopes = [np.where(full, 1.0, each) for each in (1.0, 2.0, rounds)]
        meets = [load - (load - line) / slope for line, slope in zip(lines, slopes, strict=True)]
        more = np.maximum.reduce(meets) - own
        self._rows = np.stack(
            [np.where(missing, np.inf, own), np.where(missing, np.inf, load), *lines, np.where(missing, np.inf, more)]
        )
        self._slopes = np.stack([each.ravel() for each in slopes[1:]])

    def within(self, more: float, below: float) -> Floats:
        """Seconds that stages add to the sum at their least, [kind, first, length - 1], if G and L keep to these."""
        terms = _Terms(*self._rows)
        return _least(terms.own, (terms.least <= more) & (terms.flat <= below))

    def at(
        self, kind: int, first: int, length: int, trips: Floats, chosen: Ints | None = None
    ) -> tuple[Floats, Floats, Floats]:
        """What stages of up to so many partitions add to the sum, G and L: [depth, length, trip].

        `trips` are seconds of the trip behind each of them, [length, trip], `chosen` the number of the depth by that
        of the trip; None: all.
        """
        rows, slopes = self._rows[:, :, kind, first, :length, None], self._slopes[:, :, None, None]
        if chosen is not None:
            rows, slopes = rows[..., 0][:, chosen].transpose(0, 2, 1)[:, None], self._slopes[:, None, None, chosen]
        terms = _Terms(*rows)
        loads, steep = terms.loads(slopes, trips)
        return terms.own, np.maximum(terms.least, steep - trips - known(terms.own)), loads

    def depths(self, steps: Sequence[KindStage], ways: Sequence[float], within: float) -> list[int]:
        """Micro-batches in flight, never more than in front, that keep a pipeline to a step where some do.

        Of these the ones with which a stage recomputes least, and of those the fewest. `ways` are seconds of the
        messages between each stage and the one in front of it, both ways, `within` those of the step.
        """
        every = [self._rows[:, :, step.kind, step.first, step.length - 1] for step in steps]
        least = [float(_Terms(*rows).own.min()) + way for rows, way in zip(every, ways, strict=True)]
        front = list(itertools.accumulate(least, initial=0.0))
        trip, number, found = 0.0, 0, list[int]()
        for n in range(len(steps) - 1, -1, -1):
            terms = _Terms(*every[n][:, number:])  # of these depths and deeper ones
            ends = front[n] + ways[n] + terms.loads(self._slopes[:, number:], np.array(trip))[0]
            late = np.where(ends <= within * (1 + ROUNDING), 0.0, ends)
            at = int(np.lexsort((terms.own, late))[0])
            number += at
            found.append(int(self._depths[number]))
            trip += min(float(terms.own[at]), _NEVER) + ways[n]
        return found[::-1]


def _least(seconds: Floats, may: Flags) -> Floats:
    """Over depths, of those that may be."""
    found: Floats = np.where(may, seconds, np.inf).min(axis=0)
    return found


class StepLoads:
    """What the stages of a pipeline take of a step, as the path program asks for it.

    Args:
        trips: The least that can lie behind each stage.
        chosen: Number of the depth, by what counts as one number of workers in `trips`; None: any that may be.
        floor: A step is no less than the pipeline's sum and this.
        more: Stages with a larger G are left out.
        below: And those with a larger L.
    """

    def __init__(
        self, prices: StepPrices, trips: LeastTrips, chosen: Ints | None = None, *, floor: float = 0.0,
        more: float = math.inf, below: float = math.inf,
    ) -> None:  # fmt: skip
        self.floor = floor
        self._prices, self._trips, self._chosen = prices, np.minimum(trips.seconds, _NEVER), chosen
        self._alike, self._more, self._below = trips.alike, more, min(below, _NEVER / 2)
        self._asked = functools.lru_cache(maxsize=1)(self._classes)

    def _classes(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """What these numbers of workers count as, and which of that each does."""
        found, which = np.unique(self._alike[start:stop], return_inverse=True)
        return found, which

    def __call__(self, kind: int, first: int, length: int, numbers: slice) -> tuple[Floats, Floats, Ints]:
        """Seconds that stages of up to so many partitions add to the sum, and that a step takes for them, at least.

        Each [length, class], and the class of each number of workers used from the stage on, with it.
        """
        classes, which = self._asked(int(numbers.start), int(numbers.stop))
        trips = self._trips[first + 1 : first + 1 + length, classes]
        chosen = None if self._chosen is None else self._chosen[classes]
        seconds, more, loads = self._prices.at(kind, first, length, trips, chosen)
        may = (more <= self._more) & (loads <= self._below)
        return _least(seconds, may), _least(loads, may), which


@dataclass(frozen=True, order=True)
class StepCell:
    """Pipelines whose largest G (`StepPrices`) is from `low` to `high` seconds, with a bound of their steps."""

    bound: float
    serial: int
    low: float
    high: float
    looked_at: bool = False
    trips: LeastTrips | None = field(default=None, compare=False)


class StepCells:
    """Branch and bound over the largest G of a pipeline's stages (`StepPrices`), in cells from `low` to `high`.

    With S the sum of a pipeline, of all pipelines in a cell

        step >= S + low,   and   step >= L of each stage and the sum in front of it,   where each stage has G <= high

    with L and G by the least trip of such stages that can lie behind it. One sweep of the path program finds the
    pipeline that takes least by these, and so a bound of the cell: a small S, of few stages that take long and
    recompute little, has the larger G. The cell of least bound is looked at, and cut in two once it is that again.

    Args:
        servers: Of stages, as of the path program.
        limit: No server of a pipeline below `below` is above it.
        below: A step is of no interest from here on.
        place: Takes pipelines of which a bound is.
    """

    def __init__(
        self, sweep: PathProgram, prices: StepPrices, servers: ServerPrices, *, limit: float, below: float,
        place: Callable[[KindPipeline], object],
    ) -> None:  # fmt: skip
        self._sweep, self._prices, self._servers, self._limit, self._place = sweep, prices, servers, limit, place
        self._open, self._serials, self._floor = [StepCell(0.0, 0, 0.0, below)], itertools.count(1), below

    @property
    def bound(self) -> float:
        """No step is below it."""
        return min(self._floor, self._open[0].bound) if self._open else self._floor

    @property
    def done(self) -> bool:
        """Whether the bound is as good as it gets."""
        return self.bound >= self._floor

    def run(self, below: float, looks: int) -> None:
        """Look at so many cells, the least bound first, until no step is below a value.

        Raises:
            OutOfTime: the time is over; what was found until then is kept.
        """
        while looks and self.bound < min(below, self._floor):
            cell = self._open[0]
            if not cell.looked_at:
                looks -= 1
                self._look(cell, min(below, self._floor))
                continue
            heapq.heappop(self._open)
            if not cell.high - cell.low > tuning.NARROW_STEP * cell.bound or math.isinf(cell.high):
                self._floor = min(self._floor, cell.bound)
                continue
            assert cell.trips is not None
            middle = (cell.low + cell.high) / 2
            upper = max(cell.bound, cell.trips.least * (1 - ROUNDING) + middle)
            lower = StepCell(cell.bound, next(self._serials), cell.low, middle)
            heapq.heappush(self._open, lower)
            heapq.heappush(self._open, StepCell(upper, next(self._serials), middle, cell.high, trips=cell.trips))

    def _look(self, cell: StepCell, below: float) -> None:
        """Put what is now known of the first cell in its place: nothing if it has no step below a value."""
        found = self._swept(cell, below)
        heapq.heappop(self._open)
        if found is None:
            self._floor = min(self._floor, below)
            return
        swept, pipeline = found
        if swept.bound < below:
            heapq.heappush(self._open, swept)
        if swept.bound >= below or swept.high < cell.high:
            self._floor = min(self._floor, below)
        self._place(pipeline)

    def _swept(self, cell: StepCell, below: float) -> tuple[StepCell, KindPipeline] | None:
        """The cell with what its pipeline that takes least tells, and that; None: it has none below a value."""
        limit, servers, near = self._limit, self._servers, below * (1 + ROUNDING)
        finite = below < math.inf
        seconds = self._prices.within(cell.high + near - below if finite else math.inf, near)
        pace = servers.forward[np.isfinite(seconds) & (servers.forward <= limit)]
        if not pace.size:
            return None
        limit = min(limit, max(float(pace.max()), self._slowest_message) * (1 + ROUNDING) or limit)
        servers = replace(servers, seconds=seconds)
        trips = cell.trips or self._sweep.trips(servers, limit, limit)
        least = trips.least * (1 - ROUNDING)
        if least + cell.low >= below:
            return None
        high = min(cell.high, below - least)
        more = high + (near - below if finite else 0.0)
        loads = StepLoads(self._prices, trips, floor=cell.low, more=more, below=near)
        found = self._sweep.least(servers, limit, limit, loads=loads)
        if found is None:
            return None
        bound = max(cell.bound, found.seconds * (1 - ROUNDING))
        return replace(cell, bound=bound, high=high, looked_at=True, trips=trips), found

    @cached_property
    def _slowest_message(self) -> float:
        """Seconds, one way."""
        every = (way for each in self._sweep.boundaries for way in (each.forward, each.backward))
        return max((float(known(way).max(initial=0.0)) for way in every), default=0.0)


_NEVER = 1e30
"""Seconds that no step takes: of what cannot lie behind a stage."""
