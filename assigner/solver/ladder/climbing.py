"""Settings that a ladder solves: 1F1B's step time, and throughput and latency under any schedule.

Of a chain, the ladder's price of throughput and latency is the value itself, and its least price the proven optimum.
The step time of 1F1B has no closed formula: there, and for graphs, the price is a lower bound, and plans are
simulated in its order until the bound reaches the best.

Under 1F1B a stage's memory depends on how many stages lie behind it, and its warm-up may be deeper than that where
memory allows: deeper hides a slow wire (Yan et al., HAPT, arXiv 2509.24859).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from assigner.errors import AssignerError, FormatError
from assigner.objective import latency_s, steady_s
from assigner.plan import Plan, Stage
from assigner.solver.chain.improve import moves
from assigner.solver.contest import PROVEN
from assigner.solver.instance import Instance
from assigner.solver.ladder.depths import falling, falling_count, fitting, nearby
from assigner.solver.ladder.ladder import Ladder
from assigner.solver.ladder.rungs import Rungs
from assigner.solver.ladder.tally import LatencyTally, SteadyTally, StepTally
from assigner.solver.setting import Setting
from assigner.timing import step_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.plan import Objective, Schedule
    from assigner.solver.contest import Contest
    from assigner.solver.ladder.depths import Depths
    from assigner.solver.ladder.rungs import Rung
    from assigner.solver.ladder.tally import Tally
    from assigner.solver.problem import Problem

CLIMBED, SEEN = "dynamic program", "enumeration"
"""How a bound was proven: by the ladder, or by simulating every pipeline below it."""

FIRST_WIDTH, PROOF_WIDTH, ALL_WIDTH = 300, 6_000, 10_000
"""Labels kept at a position: for good plans, for a bound, and to find every plan below the target."""

MOST_SIMULATED = 400
"""So many pipelines are simulated for a proof."""

_Key = tuple[tuple[int, int, tuple[int, ...]], ...]
"""A pipeline: where each stage starts, the group of its worker, what it runs twice."""

_UNKNOWN: Depths = ()

TIE = 1e-12
"""Plans that differ by less, as a share, are as good: rounding must not choose between them."""

MOST_TRIED = 24
"""So many are simulated where there is no proof to be had from it."""

DEPTHS = 200
"""Up to so many choices of warm-up depths, all are simulated; of more, those of a few policies."""

LABELS = 40_000_000
"""So many labels a ladder may make in one climb: with many rungs it keeps fewer at a position."""

MOST_LABELS = 4 * LABELS
"""The same where it goes on because time is left: memory is the limit."""

FULL = 8_000
"""With more rungs than this, a ladder leaves memory out."""

COARSE = 100_000
"""With more rungs than this, there is no ladder: the perfect split of all work is the bound."""

SIMULATED = 200_000
"""Local search ends after so many simulated actions: counted, not timed, so that the answer is the same every time."""


class LadderSetting(Setting):
    """One stage a worker, with M micro-batches.

    Args:
        contest: What it shares with the other settings.
        schedule: "gpipe" or "1f1b".
        micro_batches: M.
        problem: As of `Setting`.
    """

    def __init__(
        self, contest: Contest, schedule: Schedule, micro_batches: int, problem: Problem | None = None
    ) -> None:
        super().__init__(contest, micro_batches, problem)
        self.schedule = schedule
        self.instance = Instance(self.problem, micro_batches)
        self._objective: Objective = self.problem.options.objective
        self._rungs = Rungs(self.instance, deep=schedule == "1f1b")
        self._ladder: Ladder | None = None
        self._wider = False  # labels or pipelines were lost for want of room that more effort gives
        self._few = False  # few enough pipelines are below the target to look at all of them
        self._start: tuple[float, Sequence[Rung]] = (math.inf, ())
        self._seen: dict[_Key, tuple[float, Depths]] = {}  # the best that was simulated
        self._deepened: set[_Key] = set()
        self._deep: dict[int, Depths] = {}  # by the number of stages: what the search for depths made of the best plan
        self._actions = SIMULATED

    def _tally(self) -> Tally:
        if self._objective == "throughput":
            return SteadyTally(self.micro_batches)
        return LatencyTally() if self._objective == "latency" else StepTally(self.micro_batches)

    def raise_bound(self, bound: float, proof: str | None = None) -> None:
        """Take a bound; of a graph with branches, not the ladder's, which knows the intervals of one order only."""
        if not (self.problem.branched and proof in (CLIMBED, SEEN)):
            super().raise_bound(bound, proof)

    def price(self) -> None:
        """The perfect split of all work: no plan of any schedule is faster."""
        rungs = Rungs(self.instance, deep=True, relaxed=True) if self._coarse else self._rungs
        self._ladder = Ladder(self.instance, rungs, self._tally(), until=self.contest.until)
        self.raise_bound(self._ladder.least())
        self.decided = math.isinf(self.bound)

    def prepare(self) -> None:
        """Simulate the ladder's best."""
        if self.bound >= self.contest.target:
            self.decided = True
            return
        for rungs in self._climb(FIRST_WIDTH, simulated=12):
            self._start = min(self._start, (self._simulate(rungs), rungs), key=lambda each: each[0])

    def improve(self) -> None:
        """Local search from the best of them."""
        if self.bound >= self.contest.target:
            self.decided = True
        elif self._start[1]:
            self._improve(*self._start)

    def relax(self) -> None:
        """Climb with more room, for the sake of the bound."""
        for rungs in self._climb(PROOF_WIDTH, simulated=MOST_TRIED):
            self._simulate(rungs)

    def _climb(self, width: int, *, simulated: int) -> Sequence[Sequence[Rung]]:
        """Pipelines below the target, the best first; the bound is raised to what the ladder proves."""
        assert self._ladder is not None
        if self.decided or self._rungs.count() > COARSE:
            return ()
        target = self.contest.target
        climb = self._ladder.climb(cutoff=target, width=self._room(width), most=MOST_SIMULATED * self.effort)
        least = climb.pipelines[0][0] if climb.pipelines else math.inf
        self._few = climb.complete and not self._coarse
        room = self.effort < MOST_LABELS // LABELS or len(climb.pipelines) >= MOST_SIMULATED * self.effort
        self._wider = room and not climb.complete
        self.raise_bound(min(least, climb.lost, target), CLIMBED)
        found = (rungs for _, rungs in climb.pipelines[:simulated])
        if self._coarse:
            fitting = (self._ladder_rungs([(r.column.first, r.column.group) for r in rungs]) for rungs in found)
            return [rungs for rungs in fitting if rungs is not None]
        return list(found)

    def prove(self) -> None:
        """Simulate every pipeline whose price is below the target, the lowest first, while there is room and time."""
        assert self._ladder is not None
        if self.effort > 1:
            self._seen.clear()  # more of their warm-up depths may be tried now
            self.relax()
        if self.decided or not self._few:
            self.cut_short = self._wider
            return
        climb = self._ladder.climb(
            cutoff=self.contest.target, width=self._room(ALL_WIDTH), dominance=False, most=MOST_SIMULATED * self.effort
        )
        open_ = climb.lost
        self.cut_short = not climb.complete
        for price, rungs in climb.pipelines:
            if self.contest.left_s <= 0:
                open_ = min(open_, price)
                break
            self.raise_bound(min(price, open_, self.contest.target), SEEN)
            if self.decided:
                return
            self._simulate(rungs, price)
            self._deepen(rungs)
            deeper = any(rung.promised > rung.deepest for rung in rungs)  # warm-ups that no rung stands for
            if self._objective == "step" and (deeper or not self._all_depths(rungs)):
                open_ = min(open_, price)
                self.cut_short |= not deeper
        self.raise_bound(min(open_, self.contest.target), SEEN)

    def _room(self, width: int) -> int:
        """Labels to keep at a position."""
        effort = min(self.effort, MOST_LABELS // LABELS)
        return max(50, min(width * effort, LABELS * effort // max(1, len(self._rungs.all))))

    @property
    def _coarse(self) -> bool:
        return self._rungs.count() > FULL

    def adopt(self) -> None:
        """Improve the best pipeline of all settings under this one; where there is none, that of a baseline."""
        best = self.contest.best
        if best is self.best and best is not None:
            return
        plan = best.plan if best is not None else self._baseline()
        if plan is None or len(plan.stages) > len(plan.workers):
            return
        group = {name: k for k, members in enumerate(self.instance.groups) for name in members}
        position = self.problem.position
        placed = sorted(
            (min(position[name] for name in stage.partitions), group[stage.worker]) for stage in plan.stages
        )
        rungs = self._ladder_rungs(placed)
        if rungs is not None:
            self._improve(self._simulate(rungs), rungs)

    def _baseline(self) -> Plan | None:
        """A simple placement to start from, for want of anything better."""
        from assigner.solver.baselines import baseline_plan

        found = (baseline_plan(self.problem, name) for name in ("proportional", "equal", "single"))
        return next((plan for plan in found if plan is not None), None)

    def _simulate(self, rungs: Sequence[Rung], price: float | None = None) -> float:
        """Offer a pipeline at the warm-up depths that it has room for; its best value, inf: it cannot run.

        Args:
            rungs: The pipeline.
            price: The ladder's, to compare with; None: it was not asked.
        """
        key = _key(rungs)
        if key in self._seen:
            return math.inf
        best, chosen = (math.inf, math.inf), _UNKNOWN
        for depths in self._depths(rungs):
            value, step = self._worth(self._plan(rungs, depths))
            as_good = value < best[0] * (1 + TIE) or math.isinf(best[0])
            if value < best[0] * (1 - TIE) or (as_good and step < best[1] * (1 - TIE)):
                best, chosen = (value, step), depths
        self._seen[key] = best[0], chosen
        if not chosen:
            return math.inf
        if price is not None:
            self._check(price, best[0])
        self.offer(best[0], lambda: self._plan(rungs, chosen))
        return best[0]

    def _deepen(self, rungs: Sequence[Rung]) -> float:
        """The best value of a simulated pipeline after local search over its warm-up depths, where some are untried."""
        key = _key(rungs)
        value, depths = self._seen.get(key, (math.inf, _UNKNOWN))
        if key in self._deepened or self._objective != "step" or not depths or self._all_depths(rungs):
            return value
        self._deepened.add(key)
        ranges, improved = self._ranges(rungs), True
        while improved:
            improved = False
            for tried in nearby(depths, ranges):
                if self._actions <= 0 or self.contest.left_s <= 0:
                    break
                self._actions -= 2 * self.micro_batches * len(rungs)
                found, _ = self._worth(self._plan(rungs, tried))
                if found < value * (1 - 1e-9):
                    value, depths, improved = found, tried, True
                    break
        self._seen[key] = value, depths
        self.offer(value, lambda: self._plan(rungs, depths))
        if value <= self.best_value:
            self._deep[len(rungs)] = depths
        return value

    def _worth(self, plan: Plan) -> tuple[float, float]:
        """The plan's value and its step time; inf: it cannot run."""
        try:
            step = step_s(plan, self.problem.cost)
        except FormatError:  # two workers that must talk have no link, or a stage would wait for ever
            return math.inf, math.inf
        return self._value(plan, step), step

    def _value(self, plan: Plan, step_s: float) -> float:
        if self._objective == "throughput":
            return self.micro_batches * steady_s(plan, self.problem.cost)
        return latency_s(plan, self.problem.cost) if self._objective == "latency" else step_s

    def _check(self, price: float, value: float) -> None:
        """Raise AssignerError if the ladder's price is no bound, or not the value where it should be."""
        exact = self.problem.exact and self._objective in ("throughput", "latency")
        if value < price * (1 - PROVEN) or (exact and value > price * (1 + PROVEN)):
            raise AssignerError(
                f"the dynamic program says {price:.9g} s for a plan that takes {value:.9g} s",
                hint="this is a bug in the solver: please report it with the profile",
            )

    def _all_depths(self, rungs: Sequence[Rung]) -> bool:
        """True if every choice of warm-up depths is simulated; of a chain, of those that do not grow."""
        ranges = [range(rung.least, rung.deepest + 1) for rung in rungs]
        choices = falling_count(ranges, self.micro_batches) if self.problem.exact else math.prod(map(len, ranges))
        return choices <= DEPTHS * self.effort

    def _depths(self, rungs: Sequence[Rung]) -> Iterator[tuple[int, ...]]:
        """Warm-up depths to try: the usual ones first, then all, or, of too many, those of a few policies.

        In a chain, a stage that warms up deeper than the one in front of it would wait for ever.
        """
        ranges = self._ranges(rungs)
        if not all(ranges):
            return
        yield from fitting(itertools.islice(self._policies(rungs), 1), ranges)
        if self._all_depths(rungs):
            yield from falling(ranges, self.micro_batches) if self.problem.exact else itertools.product(*ranges)
            return
        yield from fitting(self._policies(rungs), ranges)

    def _ranges(self, rungs: Sequence[Rung]) -> list[range]:
        """The warm-up depths that each stage may have."""
        full = self._tally().flows
        return [
            range(max(rung.least, self._rungs.usual(len(rungs) - n) if full else 0), rung.deepest + 1)
            for n, rung in enumerate(rungs)
        ]

    def _policies(self, rungs: Sequence[Rung]) -> Iterator[Sequence[int]]:
        """Depths worth a try: the usual ones, what covers the round trip at the pace of the slowest stage, and more.

        The last stage's warm-up is left alone: deeper, it only puts the first backward off.
        """
        usual = [self._rungs.usual(len(rungs) - n) for n in range(len(rungs))]
        pace = max(rung.column.forward_s + rung.column.backward_s for rung in rungs) or 1.0
        trips, trip = [0] * len(rungs), 0.0
        for n in range(len(rungs) - 1, -1, -1):
            column = rungs[n].column
            hop = (
                self.instance.hop(rungs[n + 1].column.first, column.group, rungs[n + 1].column.group)
                if (n + 1 < len(rungs))
                else None
            )
            trip += column.forward_s + column.backward_s + (hop.forward_s + hop.backward_s if hop else 0.0)
            trips[n] = math.ceil(trip / pace - PROVEN)
        for policy in (
            lambda d, _: d,
            max,
            lambda d, t: max(d, t + 1),
            lambda d, _: d + (d > 1),
            lambda d, _: math.ceil(1.5 * d - 0.5),
            lambda d, _: max(1, 2 * d - 2),
            lambda d, _: self.micro_batches if d > 1 else 1,
        ):
            yield [policy(d, t) for d, t in zip(usual, trips, strict=True)]
        if len(rungs) in self._deep:  # what was best elsewhere
            yield self._deep[len(rungs)]

    def _plan(self, rungs: Sequence[Rung], depths: Sequence[int]) -> Plan:
        problem = self.problem
        free = [list(reversed(group)) for group in self.instance.groups]
        stages = []
        for n, (rung, depth) in enumerate(zip(rungs, depths, strict=True)):
            column, default = rung.column, self._rungs.usual(len(rungs) - n)
            worker = free[column.group].pop()
            stages.append(
                Stage(
                    worker, problem.names(range(column.first, column.last + 1)),
                    problem.names(column.rematerialise),
                    in_flight=None if depth == default else depth,
                    threads=problem.profile.worker[worker].threads,
                )
            )  # fmt: skip
        return Plan(
            workload=problem.workload, objective=self._objective, schedule=self.schedule,
            micro_batches=self.micro_batches, micro_batch_size=self.size, stages=tuple(stages),
        )  # fmt: skip

    def _improve(self, value: float, rungs: Sequence[Rung]) -> None:
        """Single moves from a pipeline as long as they make it faster."""
        n, sizes = len(self.problem.order), tuple(len(group) for group in self.instance.groups)
        value, improved = min(value, self._deepen(rungs)), True
        while improved:
            improved = False
            stages = tuple((rung.column.first, rung.column.group) for rung in rungs)
            for moved in moves(stages, n, sizes):
                if self._actions <= 0 or self.contest.left_s <= 0:
                    return
                tried = self._ladder_rungs(moved)
                if tried is not None:
                    self._actions -= 8 * self.micro_batches * len(tried)
                    found = self._simulate(tried)
                    if found < value * (1 - 1e-9):
                        value, rungs, improved = min(found, self._deepen(tried)), tried, True
                        break

    def _ladder_rungs(self, stages: Sequence[tuple[int, int]]) -> tuple[Rung, ...] | None:
        """The rungs, recomputing least, of stages given as (start, group); None: one of them does not fit."""
        if len(stages) > self.problem.most_workers:
            return None
        ends = [start for start, _ in stages[1:]] + [len(self.problem.order)]
        found = [
            self._rungs.find(start, end - 1, group, len(stages) - n)
            for n, ((start, group), end) in enumerate(zip(stages, ends, strict=True))
        ]
        whole = tuple(rung for rung in found if rung is not None)
        meets = all(
            self.instance.hop(right.column.first, left.column.group, right.column.group) is not None
            for left, right in itertools.pairwise(whole)
        )
        return whole if len(whole) == len(found) and meets else None


def _key(rungs: Sequence[Rung]) -> _Key:
    return tuple((rung.column.first, rung.column.group, rung.column.rematerialise) for rung in rungs)
