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
from functools import partial
from typing import TYPE_CHECKING

from assigner.errors import AssignerError, FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.objective import latency_s, steady_s
from assigner.schedule.timing import step_s
from assigner.solver import tuning
from assigner.solver.contest import DYNAMIC_PROGRAM, ENUMERATION, INTEGER_PROGRAM, LOCAL, PROVEN, RELAXATION, TOTAL_WORK
from assigner.solver.dynamic_program import DynamicProgram
from assigner.solver.ilp.one_f_one_b import OneFOneBModel
from assigner.solver.ladder.depth_search import DepthSearch
from assigner.solver.ladder.depths import falling, falling_count, fitting, nearby
from assigner.solver.local_search import is_better, local_search, pipeline_moves
from assigner.solver.objectives import Latency, OneFOneBStep, SteadyState
from assigner.solver.prices import StageOptions
from assigner.solver.setting import Setting
from assigner.solver.shares import held_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.terms import Objective, Schedule
    from assigner.solver.contest import Contest
    from assigner.solver.dynamic_program import PricedPipelines
    from assigner.solver.ladder.depths import Depths
    from assigner.solver.local_search import Intervals
    from assigner.solver.objectives import PipelineObjective
    from assigner.solver.prices import StageOption
    from assigner.solver.problem import Problem

_Key = tuple[tuple[int, int, tuple[int, ...]], ...]
"""A pipeline: where each stage starts, the group of its worker, what it runs twice."""

_UNKNOWN: Depths = ()

TIE = 1e-12
"""Plans that differ by less, as a share, are as good: rounding must not choose between them."""


class LadderSetting(Setting):
    """One stage a worker, with M micro-batches.

    Attributes:
        statement: The ILP of its step time.
        cuts: Pipelines with the seconds that they take, where the ILP says less.

    Args:
        contest: What it shares with the other settings.
        schedule: "gpipe" or "1f1b".
        micro_batches: M.
        problem: As of `Setting`.
    """

    statement = OneFOneBModel
    most_depths = tuning.MOST_DEPTHS

    def __init__(
        self, contest: Contest, schedule: Schedule, micro_batches: int, problem: Problem | None = None
    ) -> None:
        super().__init__(contest, micro_batches, problem)
        self.schedule = schedule
        self.instance = self.problem.prices(micro_batches)
        self._objective: Objective = self.problem.options.objective
        self._options = self._stage_options(deep=schedule == "1f1b")
        self._program: DynamicProgram | None = None
        self._wider = False  # labels or pipelines were lost for want of room that more effort gives
        self._few = False  # few enough pipelines are below the target to look at all of them
        self._start: tuple[float, Sequence[StageOption]] = (math.inf, ())
        self.cuts: list[tuple[Sequence[StageOption], float]] = []
        self._seen: dict[_Key, tuple[float, Depths]] = {}  # the best that was simulated
        self._deepened: set[_Key] = set()
        self._deep: dict[int, Depths] = {}  # by the number of stages: what the search for depths made of the best plan
        self._actions = tuning.SIMULATED_ACTIONS

    def _stage_options(self, *, deep: bool) -> StageOptions:
        return self.instance.one_f_one_b if deep else self.instance.gpipe

    def _additive(self) -> PipelineObjective:
        if self._objective == "throughput":
            return SteadyState(self.micro_batches)
        return Latency() if self._objective == "latency" else OneFOneBStep(self.micro_batches)

    def raise_bound(self, bound: float, proof: str) -> None:
        """Take a bound; of a graph with branches, not the ladder's, which knows the intervals of one order only."""
        if not (self.problem.branched and proof in (DYNAMIC_PROGRAM, ENUMERATION)):
            super().raise_bound(bound, proof)

    def price(self) -> None:
        """The perfect split of all work: no plan of any schedule is faster."""
        options = StageOptions(self.instance, deep=True, relaxed=True) if self._coarse else self._options
        self._program = DynamicProgram(self.instance, options, self._additive(), until=self.contest.until)
        self.raise_bound(self._program.least(), TOTAL_WORK)
        self.decided = math.isinf(self.bound)

    def start(self) -> None:
        """Simulate the ladder's best."""
        if self.bound >= self.contest.target:
            self.decided = True
            return
        for _, pipeline in self._climb(tuning.FIRST_WIDTH)[:12]:
            self._start = min(self._start, (self._simulate(pipeline), pipeline), key=lambda each: each[0])

    def improve(self) -> None:
        """Local search from the best of them."""
        if self.bound >= self.contest.target:
            self.decided = True
        elif self._start[1]:
            self._improve(*self._start)

    def tighten(self) -> None:
        """Climb with more room, for the sake of the bound."""
        found = self._climb(tuning.PROOF_WIDTH)
        if self._boxed:
            self._search_depths(found, self.bound)
        else:
            for _, pipeline in found[: tuning.MOST_TRIED]:
                self._simulate(pipeline)

    def _climb(self, width: int) -> Sequence[tuple[float, Sequence[StageOption]]]:
        """Prices and pipelines below the target, the best first; the bound is raised to what the ladder proves."""
        assert self._program is not None
        if self.decided or self._options.count() > tuning.COARSE_OPTIONS:
            return ()
        target = self.contest.target
        climb = self._run(width, most=tuning.MOST_SIMULATED)
        least = climb.pipelines[0][0] if climb.pipelines else math.inf
        self._few = climb.complete and not self._coarse
        room = (
            self.effort < tuning.MOST_LABELS // tuning.LABELS
            or len(climb.pipelines) >= tuning.MOST_SIMULATED * self.effort
        )
        self._wider = room and not climb.complete
        self.raise_bound(min(least, climb.lost, target), DYNAMIC_PROGRAM)
        if self._coarse:
            fitting = ((price, self._stages([(r.first, r.group) for r in found])) for price, found in climb.pipelines)
            return [(price, pipeline) for price, pipeline in fitting if pipeline is not None]
        return climb.pipelines

    def _run(self, width: int, *, most: int, dominance: bool = True) -> PricedPipelines:
        """The ladder, with as many times the room as the effort."""
        assert self._program is not None
        effort = min(self.effort, tuning.MOST_LABELS // tuning.LABELS)
        return self._program.run(
            cutoff=self.contest.target, width=width * effort, made=tuning.LABELS * effort, dominance=dominance,
            most=most * self.effort,
        )  # fmt: skip

    @property
    def _boxed(self) -> bool:
        """Whether depths are searched for by branch and bound: all are, so that what is below the target is certain."""
        return self._objective == "step" and self.problem.exact and not self._options.only_shared

    def prove(self) -> None:
        """Simulate every pipeline whose price is below the target, the lowest first, while there is room and time."""
        assert self._program is not None
        if self.effort > 1:
            self._seen.clear()  # more of their warm-up depths may be tried now
            self.tighten()
        if self.decided or not self._few:
            self.cut_short = self._wider
            return
        most = tuning.MOST_SEARCHED if self._boxed else tuning.MOST_SIMULATED
        climb = self._run(tuning.ALL_WIDTH, most=most, dominance=False)
        self.cut_short = not climb.complete
        if self._boxed:
            self._search_depths(climb.pipelines, climb.lost)
        else:
            self._simulate_all(climb)

    def _search_depths(self, pipelines: Sequence[tuple[float, Sequence[StageOption]]], open_: float) -> None:
        """Have branch and bound name the depths of pipelines whose bound is below the target, and simulate those.

        Args:
            pipelines: Their prices, and they themselves.
            open_: No others take less, in seconds.
        """
        search = DepthSearch(self.instance, pipelines)
        while search.bound < self.contest.target and self.contest.left_s > 0:
            if search.boxes >= tuning.MOST_BOXES * self.effort:
                self.cut_short = True
                break
            for bound, pipeline, depths in search.split(self.contest.target):
                if any(depth > option.deepest for option, depth in zip(pipeline, depths, strict=True)):
                    open_ = min(open_, bound)  # with more recomputing than an option stands for
                elif bound < self.contest.target:
                    value, _ = self._worth(self._plan(pipeline, depths))
                    self._check(bound, value)
                    self.offer(value, partial(self._plan, pipeline, depths), ENUMERATION)
            self.raise_bound(min(search.bound, open_, self.contest.target), ENUMERATION)
            self.contest.watch()
        self.raise_bound(min(search.bound, open_, self.contest.target), ENUMERATION)

    def _simulate_all(self, climb: PricedPipelines) -> None:
        """Simulate pipelines, the lowest price first, until the price reaches the target."""
        open_ = climb.lost
        for price, pipeline in climb.pipelines:
            if self.contest.left_s <= 0:
                open_ = min(open_, price)
                break
            self.raise_bound(min(price, open_, self.contest.target), ENUMERATION)
            if self.decided:
                return
            self._simulate(pipeline, price)
            self._deepen(pipeline)
            deeper = any(option.promised > option.deepest for option in pipeline)  # warm-ups that no option stands for
            if self._objective == "step" and (deeper or not self._tried_all(pipeline)):
                open_ = min(open_, price)
                self.cut_short |= not deeper
        self.raise_bound(min(open_, self.contest.target), ENUMERATION)

    @property
    def closable(self) -> bool:
        """As `Setting` has it: by the number of stage options; of throughput and latency the ladder itself is exact."""
        most = tuning.CLOSE_SEARCHED if self._boxed else tuning.CLOSE_OPTIONS
        small = self._objective == "step" and self._options.count() <= tuning.CLOSE_OPTIONS
        return small and len(self._options.all) <= most

    def close(self) -> None:
        """Have the ILP close what is small; of the rest look at every pipeline below the target, before it is asked."""
        small = len(self._options.all) <= tuning.CLOSE_OPTIONS
        if small:
            self.settle()
        if self._boxed and not self.decided:
            self.tighten()
            if not self.decided:
                self.prove()
        if not (small or self.decided):
            self.settle()

    def settle(self) -> bool:
        """Have the ILP name pipelines whose bound is below the target, and simulate each; whether none is left."""
        self._name_and_cut()
        return self.decided

    def _name_and_cut(self) -> None:
        contest, target = self.contest, self.contest.target
        options = [
            option for option in self._options.all
            if self.micro_batches * (option.forward_s + option.backward_s) < target
        ]  # fmt: skip
        model = OneFOneBModel(self.instance, options, unit=contest.unit)
        outcome = contest.backend.relax(model.problem, time_limit=contest.left_s).scaled(model.unit)
        if not outcome.finished:
            return
        self.raise_bound(min(outcome.bound, target), RELAXATION)
        if self.decided:
            return
        kept = [
            option for option, x in zip(model.columns, model.x, strict=True)
            if outcome.value + max(0.0, x.dj or 0.0) * model.unit < target * (1 + PROVEN)
        ]  # fmt: skip
        model = OneFOneBModel(self.instance, kept, unit=contest.unit)
        for _ in range(tuning.CLOSE_CUTS):
            target = contest.target
            found = contest.backend.search(
                model.problem, gap=contest.gap, cutoff=target / model.unit, time_limit=contest.share_s,
                nodes=contest.nodes,
            ).scaled(model.unit)  # fmt: skip
            self.raise_bound(min(found.bound, target), INTEGER_PROGRAM)
            if self.decided or not found.found:
                return
            pipeline = model.chosen()
            if not self._all_depths(pipeline) or any(option.promised > option.deepest for option in pipeline):
                return  # the simulator cannot say what it takes at best
            key = pipeline_key(pipeline)
            if key not in self._seen:
                self._simulate(pipeline, found.bound, found_by=INTEGER_PROGRAM)
            self.cuts.append((pipeline, self._seen[key][0]))
            model.cut(*self.cuts[-1])

    @property
    def stage_options(self) -> Sequence[StageOption]:
        """Every stage option: the columns of its ILP."""
        return self._options.all

    @property
    def _coarse(self) -> bool:
        return self._options.count() > tuning.FULL_OPTIONS

    def adopt(self) -> None:
        """Improve the best pipeline of all settings under this one; where there is none, that of a baseline."""
        best = self.contest.best
        if best is self.best and best is not None:
            return
        plan = best.plan if best is not None else self._baseline()
        if plan is None or len(plan.stages) > len(plan.workers):
            return
        group = {name: k for k, members in enumerate(self.instance.groups) for name in members}
        held = [tuple(sorted(group[worker] for worker in stage.workers)) for stage in plan.stages]
        if not all(members in self._options.sets for members in held):
            return
        position = self.problem.position
        placed = sorted(
            (min(position[name] for name in stage.partitions), self._options.sets.index(members))
            for stage, members in zip(plan.stages, held, strict=True)
        )
        pipeline = self._stages(placed)
        if pipeline is not None:
            self._improve(self._simulate(pipeline, found_by=LOCAL), pipeline)

    def _baseline(self) -> Plan | None:
        """A simple placement to start from, for want of anything better."""
        from assigner.solver.baselines import baseline_plan

        found = (baseline_plan(self.problem, name) for name in ("proportional", "equal", "single"))
        return next((plan for plan in found if plan is not None), None)

    def _simulate(
        self, pipeline: Sequence[StageOption], price: float | None = None, *, found_by: str = DYNAMIC_PROGRAM
    ) -> float:
        """Offer a pipeline at the warm-up depths that it has room for; its best value, inf: it cannot run.

        Args:
            pipeline: The pipeline.
            price: The ladder's, to compare with; None: it was not asked.
            found_by: What has found it.
        """
        key = pipeline_key(pipeline)
        if key in self._seen:
            return math.inf
        best, chosen = (math.inf, math.inf), _UNKNOWN
        for depths in self._depths(pipeline):
            value, step = self._worth(self._plan(pipeline, depths))
            as_good = value < best[0] * (1 + TIE) or math.isinf(best[0])
            if value < best[0] * (1 - TIE) or (as_good and step < best[1] * (1 - TIE)):
                best, chosen = (value, step), depths
        self._seen[key] = best[0], chosen
        if not chosen:
            return math.inf
        if price is not None:
            self._check(price, best[0])
        self.offer(best[0], lambda: self._plan(pipeline, chosen), found_by)
        return best[0]

    def _deepen(self, pipeline: Sequence[StageOption]) -> float:
        """The best value of a simulated pipeline after local search over its warm-up depths, where some are untried."""
        key = pipeline_key(pipeline)
        value, depths = self._seen.get(key, (math.inf, _UNKNOWN))
        if key in self._deepened or self._objective != "step" or not depths or self._all_depths(pipeline):
            return value
        self._deepened.add(key)
        ranges = self._ranges(pipeline)

        def price(tried: Depths) -> float:
            self._actions -= 2 * self.micro_batches * len(pipeline)
            return self._worth(self._plan(pipeline, tried))[0]

        depths, value = local_search(
            depths, value, neighbours=lambda at: nearby(at, ranges), price=price, may_go_on=self._may_go_on
        )
        self._seen[key] = value, depths
        self.offer(value, lambda: self._plan(pipeline, depths), LOCAL)
        if value <= self.best_value:
            self._deep[len(pipeline)] = depths
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
                f"the search says {price:.9g} s for a plan that takes {value:.9g} s",
                hint="this is a bug in the solver: please report it with the profile",
            )

    def _all_depths(self, pipeline: Sequence[StageOption]) -> bool:
        """True if every choice of warm-up depths is simulated; of a chain, of those that do not grow."""
        ranges = [range(option.least, option.deepest + 1) for option in pipeline]
        choices = falling_count(ranges, self.micro_batches) if self.problem.exact else math.prod(map(len, ranges))
        return choices <= self.most_depths * self.effort

    def _tried_all(self, pipeline: Sequence[StageOption]) -> bool:
        """True if the simulator has priced every plan that the pipeline stands for."""
        return self._all_depths(pipeline)

    def _depths(self, pipeline: Sequence[StageOption]) -> Iterator[tuple[int, ...]]:
        """Warm-up depths to try: the usual ones first, then all, or, of too many, those of a few policies.

        In a chain, a stage that warms up deeper than the one in front of it would wait for ever.
        """
        ranges = self._ranges(pipeline)
        if not all(ranges):
            return
        yield from fitting(itertools.islice(self._policies(pipeline), 1), ranges)
        if self._all_depths(pipeline):
            yield from falling(ranges, self.micro_batches) if self.problem.exact else itertools.product(*ranges)
            return
        yield from fitting(self._policies(pipeline), ranges)

    def _ranges(self, pipeline: Sequence[StageOption]) -> list[range]:
        """The warm-up depths that each stage may have."""
        full = self._additive().flows
        return [
            range(max(option.least, self._usual(pipeline, n) if full else 0), option.deepest + 1)
            for n, option in enumerate(pipeline)
        ]

    def _usual(self, pipeline: Sequence[StageOption], n: int) -> int:
        """The schedule's own warm-up depth of stage n: the workers from it on."""
        return self._options.usual(sum(len(self._options.sets[option.group]) for option in pipeline[n:]))

    def _policies(self, pipeline: Sequence[StageOption]) -> Iterator[Sequence[int]]:
        """Depths worth a try: the usual ones, what covers the round trip at the pace of the slowest stage, and more.

        The last stage's warm-up is left alone: deeper, it only puts the first backward off.
        """
        usual = [self._usual(pipeline, n) for n in range(len(pipeline))]
        pace = max(option.pace_s(self.micro_batches) for option in pipeline) or 1.0
        trips, trip = [0] * len(pipeline), 0.0
        for n in range(len(pipeline) - 1, -1, -1):
            column = pipeline[n]
            hop = (
                self._options.hop(pipeline[n + 1].first, column.group, pipeline[n + 1].group)
                if (n + 1 < len(pipeline))
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
        if len(pipeline) in self._deep:  # what was best elsewhere
            yield self._deep[len(pipeline)]

    def _plan(self, pipeline: Sequence[StageOption], depths: Sequence[int]) -> Plan:
        problem = self.problem
        free = [list(reversed(group)) for group in self.instance.groups]
        stages = []
        for n, (option, depth) in enumerate(zip(pipeline, depths, strict=True)):
            default = self._usual(pipeline, n)
            stage = Stage(
                None,
                problem.names(range(option.first, option.last + 1)),
                problem.names(option.rematerialise),
                in_flight=None if depth == default else depth,
            )
            names = [free[group].pop() for group in self._options.sets[option.group]]
            stages.append(held_by(stage, names, option.shares, problem.profile))
        return Plan(
            workload=problem.workload, objective=self._objective, schedule=self.schedule,
            micro_batches=self.micro_batches, micro_batch_size=self.size, stages=tuple(stages),
        )  # fmt: skip

    def _may_go_on(self) -> bool:
        """Whether local search has actions and time left."""
        return self._actions > 0 and self.contest.left_s > 0

    def _improve(self, value: float, pipeline: Sequence[StageOption]) -> None:
        """Single moves from a pipeline as long as they make it faster."""
        n, sizes = len(self.problem.order), tuple(map(len, self.instance.groups))
        least = min(value, self._deepen(pipeline))

        def price(stages: Intervals) -> float:
            nonlocal least
            tried = self._stages(stages)
            if tried is None:
                return math.inf
            self._actions -= 8 * self.micro_batches * len(tried)
            found = self._simulate(tried, found_by=LOCAL)
            if is_better(found, least):
                least = found = min(found, self._deepen(tried))
            return found

        local_search(
            tuple((option.first, option.group) for option in pipeline), least, price=price,
            may_go_on=self._may_go_on, neighbours=lambda at: pipeline_moves(at, n, sizes, self._options.sets),
        )  # fmt: skip

    def _stages(self, stages: Sequence[tuple[int, int]]) -> tuple[StageOption, ...] | None:
        """The stage options, recomputing least, of stages as (start, who has it); None: one of them does not fit."""
        if sum(many := [len(self._options.sets[number]) for _, number in stages]) > self.problem.most_workers:
            return None
        ends = [start for start, _ in stages[1:]] + [len(self.problem.order)]
        found = [
            self._options.find(start, end - 1, number, sum(many[n:]))
            for n, ((start, number), end) in enumerate(zip(stages, ends, strict=True))
        ]
        whole = tuple(option for option in found if option is not None)
        meets = all(
            self._options.hop(right.first, left.group, right.group) is not None
            for left, right in itertools.pairwise(whole)
        )
        return whole if len(whole) == len(found) and meets else None


def pipeline_key(pipeline: Sequence[StageOption]) -> _Key:
    """What tells pipelines apart that are simulated by themselves."""
    return tuple((option.first, option.group, option.rematerialise) for option in pipeline)
