"""Candidates of pipelines that a dynamic program finds: every schedule and objective, one stage a worker.

Of a chain, the program's price of throughput and latency is the value itself, and its least price the proven optimum;
where the search for what a stage rematerialises was cut off, the price has a floor of its seconds, and is a bound.
The step time of 1F1B has no closed formula, GPipe's may turn before the last stage: there, and for graphs, the price is
a lower bound, and plans are simulated in its order until the bound reaches the best.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from assigner.solver.fleet.kind_sweeps import KindSweeps
from assigner.solver.ilp.pipelines import PipelineModel
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import (
    DYNAMIC_PROGRAM,
    ENUMERATION,
    INTEGER_PROGRAM,
    LOCAL,
    PROVEN,
    TOTAL_WORK,
    CandidateSearch,
)
from assigner.solver.methods.dynamic_program import DynamicProgram
from assigner.solver.pipelines.depth_search import DepthSearch
from assigner.solver.pipelines.simulated import PipelinePlans
from assigner.solver.problem.objectives import GPipeStep, Latency, OneFOneBStep, SteadyState
from assigner.solver.problem.stage_options import StageOptions, exactness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.terms import Objective, Schedule
    from assigner.solver.limits.clock import SolveClock
    from assigner.solver.methods.candidate import SearchState
    from assigner.solver.methods.dynamic_program import PricedPipelines
    from assigner.solver.pipelines.simulated import Depths, Priced
    from assigner.solver.problem.objectives import PipelineObjective
    from assigner.solver.problem.problem import Problem
    from assigner.solver.problem.stage_options import StageOption


class PipelineCandidate(CandidateSearch):
    """One stage a worker, with M micro-batches; stages are intervals of one order.

    Attributes:
        begin_at: Where local search begins.
        cuts: Pipelines with the seconds that they take at least, where the ILP says less.
    """

    def __init__(
        self, state: SearchState, schedule: Schedule, micro_batches: int, problem: Problem | None = None
    ) -> None:
        super().__init__(state, micro_batches, problem)
        self.schedule = schedule
        self.table = self.problem.prices(micro_batches).intervals
        self.objective: Objective = self.problem.options.objective
        # what a ranking leaves to `prove`: to look at each below the target, as they are few; to rank with more room,
        # for want of which some were lost; or nothing that tells more
        self._next: Literal["each", "wider", "nothing"] = "nothing"
        self.begin_at: Priced = math.inf, ()
        self.cuts: list[tuple[Sequence[StageOption], float]] = []

    @cached_property
    def options(self) -> StageOptions:
        """What its pipelines are made of."""
        return self.table.one_f_one_b if self.schedule == "1f1b" else self.table.gpipe

    @cached_property
    def plans(self) -> PipelinePlans:
        """Its pipelines as plans."""
        return PipelinePlans(self)

    @cached_property
    def additive(self) -> PipelineObjective:
        """How the dynamic program's price of a pipeline adds up."""
        if self.objective == "throughput":
            return SteadyState(self.micro_batches)
        if self.objective == "latency":
            return Latency()
        return OneFOneBStep(self.micro_batches) if self.schedule == "1f1b" else GPipeStep(self.micro_batches)

    def raise_bound(self, bound: float, proof: str) -> None:
        """Take a bound; of a graph with branches, not the dynamic program's: it knows intervals of one order only."""
        if not (self.problem.branched and proof in (DYNAMIC_PROGRAM, ENUMERATION)):
            super().raise_bound(bound, proof)

    @cached_property
    def program(self) -> DynamicProgram:
        """Its dynamic program; with too many options, memory is left out of it."""
        options = StageOptions(self.table, deep=True, relaxed=True) if self._coarse else self.options
        return DynamicProgram(options, self.additive)

    def price(self) -> None:
        """The perfect split of all work: no plan of any schedule is faster."""
        self.raise_bound(self.program.least(), TOTAL_WORK)
        self.decided |= math.isinf(self.bound)

    @cached_property
    def kinds(self) -> KindSearch | None:
        """What goes by kinds of workers, where the dynamic program takes long; of throughput its price tells more."""
        few = tuning.EXACT_VISITS if self.objective == "throughput" else tuning.FEW_VISITS
        if self.schedule != "1f1b" or not self.problem.exact or self.shares or self.table.visits <= few:
            return None
        return KindSearch(self)

    @property
    def sifts(self) -> bool:
        """Whether local search simulates no plan that many longest ways at once say is no better: of large pipelines.

        Where workers are taken by kind, unless stages take long to be priced.
        """
        by_kinds = self.objective == "step" and self.kinds is not None
        return by_kinds and self.table.visits <= tuning.MOST_VISITS

    def start(self) -> None:
        """Simulate the dynamic program's best, or pipelines of kinds of workers."""
        if self.bound >= self.state.target:
            self.decided = True
            return
        if self.kinds is not None:
            self.kinds.start()
            if self.decided or self.begin_at[1]:
                return
        for _, pipeline in self._ranked(tuning.FIRST_WIDTH)[:12]:
            self.begin_at = min(self.begin_at, (self.plans.simulate(pipeline), pipeline), key=lambda each: each[0])

    def improve(self) -> None:
        """Local search from the best of them."""
        if self.bound >= self.state.target:
            self.decided = True
        elif self.begin_at[1]:
            self.begin_at = self.plans.improve(*self.begin_at)

    def least_of(self, pipeline: Sequence[StageOption]) -> float:
        """No plan of a pipeline takes less, as far as is known without simulating it: the dynamic program's price."""
        return 0.0 if self.shares or self._coarse else self.program.price(pipeline)

    def improve_from(self, stages: Sequence[tuple[str, int]]) -> None:
        """Local search from stages along the order: the worker of each, and how many partitions it has."""
        starts = itertools.accumulate((count for _, count in stages[:-1]), initial=0)
        pipeline = self.plans.pipeline_of(
            [(start, self.table.group_of[name]) for start, (name, _) in zip(starts, stages, strict=True)]
        )
        if pipeline is not None:
            self.plans.improve(self.plans.simulate(pipeline, found_by=LOCAL), pipeline)

    def tighten(self) -> None:
        """Rank more of them, for the sake of the bound; or have it by kinds of workers, as plans of the target keep."""
        if self.kinds is not None:
            self.kinds.bound()
            if self.decided or not self.program.sharp:
                return
        found = self._ranked(tuning.PROOF_WIDTH)
        if self._boxed and not self.shares:
            self._search_depths(found, self.bound)
        else:
            for _, pipeline in found[: tuning.MOST_TRIED]:
                self.plans.simulate(pipeline)

    def _ranked(self, width: int) -> Sequence[Priced]:
        """Prices and pipelines below the target, the best first; the bound is raised to what that proves."""
        if self.decided or self.options.count() > tuning.COARSE_OPTIONS:
            return ()
        target = self.state.target
        ranked = self._run(width, most=tuning.MOST_SIMULATED)
        least = ranked.pipelines[0][0] if ranked.pipelines else math.inf
        few, effort = ranked.complete and not self._coarse, self.effort
        room = effort < tuning.MOST_LABELS // tuning.LABELS or len(ranked.pipelines) >= tuning.MOST_SIMULATED * effort
        self._next = "each" if few else "wider" if room and not ranked.complete else "nothing"
        self.raise_bound(min(least, ranked.lost, target), DYNAMIC_PROGRAM)
        if self._coarse:
            fitting = (
                (price, self.plans.pipeline_of([(each.first, each.group) for each in found]))
                for price, found in ranked.pipelines
            )
            return [(price, pipeline) for price, pipeline in fitting if pipeline is not None]
        return ranked.pipelines

    def _run(self, width: int, *, most: int, dominance: bool = True) -> PricedPipelines:
        """The dynamic program, with as many times the room as the effort."""
        effort = min(self.effort, tuning.MOST_LABELS // tuning.LABELS)
        return self.program.run(
            cutoff=self.state.target, width=width * effort, made=tuning.LABELS * effort, dominance=dominance,
            most=most * self.effort,
        )  # fmt: skip

    @property
    def _boxed(self) -> bool:
        """Whether depths are searched for by branch and bound: all are, so that what is below the target is certain."""
        deep = self.schedule == "1f1b" and self.objective == "step"
        return deep and self.problem.exact

    def prove(self) -> None:
        """Simulate every pipeline whose price is below the target, the lowest first, while there is room and time."""
        self.cut_short = False
        if self.kinds is not None:
            self.kinds.prove()
            self.cut_short = self.kinds.cut_short
            if not self.program.sharp:  # there are too many
                return
        if self.effort > 1 and self._next != "nothing" and not self.decided:
            self.plans.forget()  # more of their warm-up depths may be tried now
            PipelineCandidate.tighten(self)  # however a subclass goes about it
        if not self.decided and self._next == "each":
            self._look_at_each()
        else:
            self.cut_short |= self._next == "wider"

    def _look_at_each(self) -> None:
        """Take every pipeline below the target, and look for its best depths or simulate it."""
        most = tuning.MOST_SEARCHED if self._boxed else tuning.MOST_SIMULATED
        ranked = self._run(tuning.ALL_WIDTH, most=most, dominance=False)
        self.cut_short = not ranked.complete
        look = self._search_depths if self._boxed else self._simulate_all
        look(ranked.pipelines, ranked.lost)

    @property
    def _proof_effort(self) -> float:
        """How many times what it counts by itself it may spend on a proof; of shared stages less for a what-if."""
        return self.effort * (self.state.shared_effort if self.shares else 1.0)

    def _search_depths(self, pipelines: Sequence[Priced], open_: float) -> None:
        """Have branch and bound name the depths of pipelines whose bound is below the target, and simulate those.

        No other pipelines take less than `open_`, in seconds.
        """
        search = DepthSearch(self.options, pipelines, check=self.state.clock.check)
        while search.bound < self.state.target and self.state.clock.left_s > 0:
            if search.boxes >= tuning.MOST_BOXES * self._proof_effort:
                self.cut_short = True
                break
            for bound, pipeline, depths in search.split(self.state.target):
                if any(depth > option.most_depth for option, depth in zip(pipeline, depths, strict=True)):
                    open_ = min(open_, bound)  # with more recomputing than an option stands for
                elif bound < self.state.target:
                    least = self._least_at(bound, pipeline, depths)
                    open_ = min(open_, least if exactness(pipeline) == 1 else bound)
            self.raise_bound(min(search.bound, open_, self.state.target), ENUMERATION)
            self.state.watch()
        self.raise_bound(min(search.bound, open_, self.state.target), ENUMERATION)

    def _least_at(self, bound: float, pipeline: Sequence[StageOption], depths: Depths) -> float:
        """No plan of a pipeline with these depths is left that has a lower value than this; the best is offered."""
        value = self.plans.offer_priced(self.plans.plan_of(pipeline, depths), ENUMERATION)
        self.plans.check_price(bound, value, pipeline)
        return math.inf

    def _simulate_all(self, pipelines: Sequence[Priced], open_: float) -> None:
        """Simulate pipelines, the lowest price first, until the price reaches the target; `open_` as above."""
        for price, pipeline in pipelines:
            if self.state.clock.left_s <= 0:
                open_ = min(open_, price)
                break
            self.raise_bound(min(price, open_, self.state.target), ENUMERATION)
            if self.decided:
                return
            self.plans.simulate(pipeline, price)
            value = self.plans.deepen(pipeline)
            deeper = any(each.has_deeper for each in pipeline)
            if self.objective == "step" and (deeper or not self.plans.tried_all(pipeline)):
                value = price
                self.cut_short |= not deeper
            open_ = min(open_, max(price, value * exactness(pipeline)))
        self.raise_bound(min(open_, self.state.target), ENUMERATION)

    @property
    def closable(self) -> bool:
        """By the number of stage options; of throughput and latency none: no search tells more of chains than prices.

        They have the floor of each stage, while a plan's value times its exactness has that of the least exact for all.
        """
        most = tuning.CLOSE_SEARCHED if self._boxed else tuning.CLOSE_OPTIONS
        small = self.objective == "step" and self.options.count() <= tuning.CLOSE_OPTIONS
        return small and len(self.options.all) <= most

    def close(self) -> None:
        """Have the ILP close what is small; of the rest look at every pipeline below the target, before it is asked."""
        small = len(self.options.all) <= tuning.CLOSE_OPTIONS
        if small:
            self.close_by_ilp()
        if self._boxed and not self.decided:
            self.tighten()
            if not self.decided:
                self.prove()
        if not (small or self.decided):
            self.close_by_ilp()

    def statement(
        self, columns: Sequence[StageOption], *, unit: float, clock: SolveClock | None = None
    ) -> PipelineModel:
        """The ILP of its step time; arguments as of `PipelineModel`."""
        return PipelineModel(self.table, columns, deep=self.schedule == "1f1b", unit=unit, clock=clock)

    def close_by_ilp(self) -> None:
        """Have the ILP name pipelines whose bound is below the target, and simulate each: decided if none is left."""
        state, target = self.state, self.state.target
        options = [
            option for option in self.options.all
            if self.micro_batches * (option.forward_s + option.backward_s) < target
        ]  # fmt: skip
        model = self.statement(options, unit=state.unit, clock=state.clock)
        outcome = self.bound_by(model, relaxed=True, most=target)
        if self.decided or not outcome.finished:
            return
        kept = [
            option for option, x in zip(model.columns, model.x, strict=True)
            if outcome.value + max(0.0, x.dj or 0.0) * model.unit < target * (1 + PROVEN)
        ]  # fmt: skip
        model, before = self.statement(kept, unit=state.unit, clock=state.clock), len(self.cuts)
        for _ in range(tuning.CLOSE_CUTS):
            target = state.target
            model.check()
            found = state.backend.search(
                model.problem, gap=state.gap, cutoff=target / model.unit, time_limit=state.share_s,
                nodes=state.nodes,
            ).scaled(model.unit)  # fmt: skip
            pipeline = model.chosen() if found.found else ()
            told = self.plans.tried_all(pipeline) and not any(option.has_deeper for option in pipeline)
            told = told and all(pipeline != known for known, _ in self.cuts[before:])
            if pipeline and told:
                value = self.plans.simulate(pipeline, found.bound, found_by=INTEGER_PROGRAM)
                self.cuts.append((pipeline, value * exactness(pipeline)))
                model.cut(*self.cuts[-1])
            self.raise_bound(min(found.bound, state.target), INTEGER_PROGRAM)
            if self.decided or not pipeline or not told:  # else no cut says more
                return

    @property
    def _coarse(self) -> bool:
        return self.options.count() > tuning.FULL_OPTIONS


class KindSearch:
    """By kinds of workers (fleet/kind_sweeps.py): a bound of a candidate's pipelines, and where local search begins.

    Of chains on which the dynamic program over workers takes long. Pipelines that sweeps over kinds name are simulated
    at once; local search begins from the best, and while time is left from the others, one after the other.
    """

    def __init__(self, candidate: PipelineCandidate) -> None:
        self._candidate, self._state = candidate, candidate.state
        self._sweeps = KindSweeps(candidate.table, candidate.objective, place=self._place)
        self._placed: list[Priced] = []  # named since local search looked for where to begin
        self._waiting: list[Priced] = []  # named before, and not begun from

    def _place(self, stages: Sequence[tuple[int, int]], depths: Depths = ()) -> None:
        """Simulate a pipeline, recomputing least, and what these depths take."""
        plans = self._candidate.plans
        pipeline = plans.pipeline_of(stages)
        if pipeline is not None:
            deep = plans.as_deep(pipeline, depths)
            found = [
                (plans.simulate(each, like=like), each) for each, like in ((pipeline, ()), (deep, ()), (deep, depths))
            ]
            self._placed.append(min(found, key=lambda each: each[0]))

    def bound(self, looks: int = 0) -> None:
        """Raise the candidate's bound to what its plans of the target keep; `looks` as of `KindSweeps.bound`."""
        try:
            self._sweeps.bound(self._state.target, looks)
        finally:  # also when the time is over
            self._candidate.raise_bound(min(self._sweeps.known, self._state.target), DYNAMIC_PROGRAM)

    def start(self) -> None:
        """First pipelines and a bound: where a plan is known, that may do; else it holds for less without one."""
        candidate, known = self._candidate, math.isfinite(self._state.best_value)
        if not known:
            self._sweeps.start(lambda: self._state.best_value)
        self.bound()
        if known and not candidate.decided:
            self._sweeps.start(lambda: self._state.best_value)
        if not candidate.decided:
            self._climb()

    def _climb(self) -> None:
        """Look for the depths of what was named since, and have local search begin from the best of all."""
        candidate, plans = self._candidate, self._candidate.plans
        if self._placed:
            plans.actions += tuning.SIMULATED_ACTIONS
            self._placed.sort(key=lambda each: each[0])
            found = [(plans.deepen(each), each) for _, each in self._placed]
            candidate.begin_at, *rest = sorted([candidate.begin_at, *self._waiting, *found], key=lambda each: each[0])
            self._placed, self._waiting = [], [each for each in rest if each[1]]

    def prove(self) -> None:
        """Tell pipelines of kinds apart, and go on from the best of those that this names, or from the next."""
        candidate, plans = self._candidate, self._candidate.plans
        self.bound(tuning.STEP_LOOKS * candidate.effort)
        before, spent = candidate.begin_at, plans.actions <= 0
        if candidate.decided:
            return
        self._climb()
        if candidate.begin_at is not before:
            candidate.begin_at = plans.improve(*candidate.begin_at)
        elif candidate.effort > 1 and candidate.leads:
            plans.actions += spent * candidate.effort * tuning.SIMULATED_ACTIONS
            start = before if spent or not self._waiting else self._waiting.pop(0)
            if start[1]:
                candidate.begin_at = min(candidate.begin_at, plans.improve(*start), key=lambda each: each[0])

    @property
    def cut_short(self) -> bool:
        """Whether more effort may tell more."""
        more = self._candidate.leads and (self._candidate.plans.actions <= 0 or bool(self._waiting))
        return more or not self._sweeps.done
