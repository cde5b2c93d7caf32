"""Pipelines in which several workers share a stage: plain data parallelism is the one of one stage.

The dynamic program's price of such a pipeline is a lower bound: what the busiest worker of a stage computes at the
best shares, and what its messages and its reduce take at least. The simulator prices the shares that reach it, at the
warm-up depths of a few policies; local search moves cuts, workers, depths and single micro-batches from one worker to
another. Of the pipelines whose price is below the target every share is looked at, in which order ever the workers are
named. Under 1F1B of a chain branch and bound names the warm-up depths of all of them that may be better; elsewhere each
has its price, then every depth simulated: what is left is proven to be no better.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.schedule.program import deeper_reader
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import DYNAMIC_PROGRAM, ENUMERATION, TOTAL_WORK
from assigner.solver.methods.dynamic_program import DynamicProgram, PricedPipelines
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.pipelines.share_search import ShareSearch
from assigner.solver.pipelines.simulated import PipelinePlans, pipeline_key
from assigner.solver.problem.interval_prices import by_kinds
from assigner.solver.problem.objectives import OneFOneBStep
from assigner.solver.problem.replica_options import ReplicaOptions
from assigner.solver.problem.stage_remat import StageRemat, with_remat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.pipelines.simulated import Depths, Pipeline, Point, Priced
    from assigner.solver.problem.interval_prices import IntervalPrices
    from assigner.solver.problem.objectives import PipelineObjective
    from assigner.solver.problem.stage_options import StageOption
    from assigner.solver.problem.stage_remat import RematChoices


class SharedCandidate(PipelineCandidate):
    """Under one schedule with M micro-batches: a worker has one stage, and at least one stage has several workers.

    Attributes:
        follower: Of 1F1B, the same under GPipe. What the dynamic program says of 1F1B at any depth holds there, too:
            its terms name no order of the backwards, and all micro-batches in flight are one of its depths.
    """

    follower: SharedCandidate | None = None
    shares = True
    turn = 1

    @cached_property
    def options(self) -> ReplicaOptions:
        """As of `PipelineCandidate`."""
        return self._options_of(self.table)

    def _options_of(self, table: IntervalPrices) -> ReplicaOptions:
        """Those that can be in a plan better than the best when they are first looked at."""
        return ReplicaOptions(table, deep=self.schedule == "1f1b", below=lambda: self.state.best_value)

    @cached_property
    def plans(self) -> SharedPlans:
        """As of `PipelineCandidate`."""
        return SharedPlans(self)

    @cached_property
    def additive(self) -> PipelineObjective:
        """As of `PipelineCandidate`; of the step a bound under both schedules."""
        if self.objective == "step":
            return OneFOneBStep(self.micro_batches, forwards_first=self.schedule == "gpipe")
        return super().additive

    @property
    def _coarse(self) -> bool:
        """No: with many options, those of one worker are told apart by less."""
        return False

    def raise_bound(self, bound: float, proof: str) -> None:
        """Take a bound; what the dynamic program proves holds for the sets of workers that it looks at."""
        if proof == TOTAL_WORK or self.options.whole:
            self._raise(min(bound, self.options.below_s), proof)

    def _raise(self, bound: float, proof: str) -> None:
        """Take a bound that holds for all sets of workers; the dynamic program's holds for the follower, too."""
        super().raise_bound(bound, proof)
        if self.follower is not None and proof == DYNAMIC_PROGRAM:
            self.follower._raise(bound, proof)

    @cached_property
    def _kinds(self) -> DynamicProgram | None:
        """The dynamic program of workers taken by kind; None: it is no other, or has too many sets of them, too."""
        table = by_kinds(self.table)
        if table is None:
            return None
        options = self._options_of(table)
        return DynamicProgram(options, self.additive) if options.whole else None

    def _bound_by_kinds(self, width: int) -> None:
        """Raise the bound by the least price of pipelines of kinds, with so many labels at a position."""
        target = self.state.target
        if self.bound >= target or math.isinf(target) or self.state.shared_work <= 0 or self._kinds is None:
            return
        before = self._kinds.work
        found = self._kinds.run(cutoff=target, width=width, made=tuning.LABELS, most=1)
        self.state.shared_work -= self._kinds.work - before
        least = found.pipelines[0][0] if found.pipelines else target
        self._raise(min(least, found.lost, target), DYNAMIC_PROGRAM)

    def start(self) -> None:
        """Simulate one stage on the most promising sets of workers, and the dynamic program's best.

        Not where the bound by kinds says that none is below the target.
        """
        self._bound_by_kinds(tuning.FIRST_WIDTH)
        if self.decided:
            return
        several = [number for number, members in enumerate(self.options.sets) if len(members) > 1]
        whole = [self.plans.pipeline_of([(0, number)]) for number in several]
        priced = [(self.program.price(each), n) for n, each in enumerate(whole) if each is not None]
        for price, n in sorted(priced)[: tuning.SHARED_STARTS]:
            pipeline = whole[n]
            if price < self.state.target and pipeline is not None:
                self.begin_at = min(self.begin_at, (self.plans.simulate(pipeline), pipeline), key=lambda each: each[0])
        super().start()

    def tighten(self) -> None:
        """By kinds; then as of `PipelineCandidate`, where every set of workers is looked at: else it tells no bound."""
        self._bound_by_kinds(tuning.PROOF_WIDTH)
        if self.options.whole and not self.decided:
            super().tighten()

    def prove(self) -> None:
        """As of one worker a stage where every set of workers is looked at; local search is all there is elsewhere."""
        if self.options.whole:
            super().prove()

    @property
    def closable(self) -> bool:
        """As `CandidateSearch` has it: by the number of stage options."""
        return self.options.whole and self.options.count() <= tuning.CLOSE_OPTIONS

    @property
    def most_effort(self) -> int:
        """As of all candidates where it is small and a gap was asked for; else by counts, whatever time there is."""
        asked = self.state.options.gap is not None
        return super().most_effort if asked and self.closable else tuning.SHARED_EFFORT

    def _run(self, width: int, *, most: int, dominance: bool = True) -> PricedPipelines:
        """As of `PipelineCandidate`, while all candidates together have not used up what large problems may spend."""
        if self.most_effort == tuning.SHARED_EFFORT and self.state.shared_work <= 0:
            return PricedPipelines((), lost=0.0)
        before = self.program.work
        found = super()._run(width, most=most, dominance=dominance)
        self.state.shared_work -= self.program.work - before
        return found

    def close(self) -> None:
        """Look at every pipeline below the target."""
        self.tighten()
        if not self.decided:
            self.prove()

    def _search_depths(self, pipelines: Sequence[Priced], open_: float) -> None:
        """As of `PipelineCandidate`, of every sharing of the pipelines."""
        search = ShareSearch(self, int(tuning.SHARINGS * self._proof_effort))
        found: list[tuple[float, Pipeline]] = []
        for price, pipeline in pipelines:
            self.state.clock.check()
            found += ((price, shared) for shared in search.sharings(tuple(pipeline)))
            if search.actions <= 0:
                self.cut_short, open_ = True, min(open_, price)
                break
        super()._search_depths(found, open_)

    def _least_at(self, bound: float, pipeline: Sequence[StageOption], depths: Depths) -> float:
        """As of `PipelineCandidate`; what the workers of a stage recompute is told by themselves."""
        return max(bound, ShareSearch(self, 0).value(tuple(pipeline), depths))

    def _simulate_all(self, pipelines: Sequence[Priced], open_: float) -> None:
        """As of `PipelineCandidate`, of every plan of the pipelines."""
        search = ShareSearch(self, int(tuning.SHARED_ACTIONS * self._proof_effort))
        for price, pipeline in pipelines:
            key = pipeline_key(pipeline)
            if self.plans.proven.get(key, price) >= self.state.target:
                continue
            self.raise_bound(min(price, open_, self.state.target), ENUMERATION)
            if self.decided:
                return
            if self.state.clock.left_s <= 0 or search.actions <= 0:
                self.cut_short = search.actions <= 0
                open_ = min(open_, price)
                break
            self.plans.simulate(pipeline)
            self.plans.deepen(pipeline)
            self.plans.proven[key] = max(price, search.least(tuple(pipeline)))
            open_ = min(open_, self.plans.proven[key])
            self.cut_short |= search.actions <= 0
        self.raise_bound(min(open_, self.state.target), ENUMERATION)


class SharedPlans(PipelinePlans):
    """Those of pipelines with shared stages; the shares are an option's, what their workers recompute is not."""

    most_depths = tuning.SHARED_DEPTHS

    def __init__(self, candidate: SharedCandidate) -> None:
        super().__init__(candidate)
        self._memory = StageRemat(self.problem)
        self.proven: dict[tuple[object, ...], float] = {}  # by pipeline, of all its shares and depths

    def ranges(self, pipeline: Sequence[StageOption]) -> list[range]:
        """As of `PipelinePlans`; under GPipe all are in flight."""
        most = self.micro_batches
        return [range(most, most + 1)] * len(pipeline) if self.schedule == "gpipe" else super().ranges(pipeline)

    def worth(self, plan: Plan) -> tuple[float, float]:
        """As of `PipelinePlans`; what a shared stage's option promises of memory need not hold for these shares.

        Plans with a reader deeper than its source are not looked for, though with shared stages some of them run.
        """
        if deeper_reader(plan, self.problem.cost.profile.edges) or not self.problem.fits(plan):
            return math.inf, math.inf
        return super().worth(plan)

    def plan_of(
        self, pipeline: Sequence[StageOption], depths: Sequence[int], groups: Sequence[Sequence[str]] | None = None
    ) -> Plan:
        """As of one worker a stage; those of a stage rematerialise what is best for the slowest for its share."""
        plan, choices = self.remat_choices(pipeline, depths, groups)
        return with_remat(plan, {n: each.sets[0] for n, each in choices.items() if each.sets})

    def remat_choices(
        self, pipeline: Sequence[StageOption], depths: Sequence[int], groups: Sequence[Sequence[str]] | None = None
    ) -> tuple[Plan, dict[int, RematChoices]]:
        """The plan whose shared stages rematerialise nothing, and by their number what they may; as `plan_of`."""
        plan = super().plan_of(pipeline, depths, groups)
        return plan, {n: self._memory.choices(plan, n) for n, option in enumerate(pipeline) if option.shares}

    def _near(self, at: Point, ranges: Sequence[range]) -> Iterator[Point]:
        """As of `PipelinePlans`; first, one micro-batch handed from one worker to another."""
        yield from ((shared, at[1]) for shared in _other_shares(at[0]))
        yield from super()._near(at, ranges)


def _other_shares(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Pipelines in which one worker of a shared stage hands one micro-batch to another."""
    for n, option in enumerate(pipeline):
        for giver, share in enumerate(option.shares):
            for taker in range(len(option.shares)):
                if taker != giver and share > 1:
                    shares = list(option.shares)
                    shares[giver] -= 1
                    shares[taker] += 1
                    yield (*pipeline[:n], replace(option, shares=tuple(shares)), *pipeline[n + 1 :])
