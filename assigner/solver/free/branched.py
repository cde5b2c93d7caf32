"""Graphs with branches: convex stages beyond the intervals of one order.

Of step time and latency (throughput is that of convex stages themselves: candidate.py) the stages of simpler plans, and
intervals along an order where the dynamic program soon ends, are plans to begin with (on such a graph the program
proves nothing), and convex stages tell whether anything fits at all, which intervals cannot prove. Of 1F1B's steps
local search looks for better ones: over convex stages at the schedule's own warm-ups, all of them where they are few,
and then along the order of the best of these.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from assigner.solver.free.annealing import Annealing
from assigner.solver.free.candidate import FreeCandidate
from assigner.solver.free.exhaustive import Exhaustive
from assigner.solver.free.pricing import SteadyPricing
from assigner.solver.free.starts import along, of_plan
from assigner.solver.ilp.placements import PlacementModel
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime, SolveClock
from assigner.solver.methods.candidate import BASELINE, EXHAUSTIVE, LOCAL, SearchState
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.prices import bits
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.set_memory import SetMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan
    from assigner.formats.terms import Schedule
    from assigner.solver.free.pricing import Arrangement, Stages


class _SimulatedPricing(SteadyPricing):
    """The value under a schedule of convex stages in the order of the best steady state, at its own warm-ups."""

    def __init__(self, memory: SetMemory, schedule: Schedule, worth: Callable[[Plan], tuple[float, float]]) -> None:
        super().__init__(memory, falling=schedule == "1f1b")
        self._schedule: Schedule = schedule
        self._worth = worth

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`."""
        found = super().price(stages)
        value = math.inf if found is None else self._worth(found.plan(self._schedule))[0]
        return None if found is None or math.isinf(value) else replace(found, value_s=value)

    def actions(self, stages: Stages) -> int:
        """See `Pricing`: a forward and a backward of each stage and micro-batch, timed by the simulator."""
        return 16 * self._table.micro_batches * len(stages)


class BranchedCandidate(PipelineCandidate):
    """Step time or latency under one schedule with M micro-batches, one stage a worker, on a graph with branches."""

    _rearranged = False

    @property
    def closable(self) -> bool:
        """No: what the ILP proves holds for intervals of one order alone."""
        return False

    @property
    def _quick(self) -> bool:
        """Whether the dynamic program soon ends."""
        return self.table.visits <= tuning.KNOWN_VISITS

    def start(self) -> None:
        """Offer the stages of the plans given, and pipelines along the order where that is quick or all there is."""
        if self.bound >= self.state.target:
            self.decided = True
            return
        pricing = self._pricing()
        for each in self.state.given:
            stages = of_plan(self.problem, each.plan)
            found = pricing.price(stages) if pricing.memory.table.may(stages) else None
            if found is not None:
                self.offer(found.value_s, partial(found.plan, self.schedule), each.found_by)
        if self._quick or self.best is None:
            super().start()
        if not self.decided and self.best is None and self._nothing_fits():
            super().raise_bound(math.inf, EXHAUSTIVE)

    def improve(self) -> None:
        """Local search from the best of the dynamic program's, and along the order of what is better."""
        super().improve()
        if not self.decided and self.best is not None and self.best.found_by.startswith(BASELINE):
            self._go_along(of_plan(self.problem, self.best.plan))

    def tighten(self) -> None:
        """Look among stages that are intervals of other orders first, now that every candidate has been improved."""
        if self.schedule == "1f1b" and self.objective == "step":
            few = len(self.problem.workers) ** len(self.problem.order) <= tuning.CERTAIN
            near = 1 + tuning.REARRANGED_WITHIN
            if self.best_value < self.state.best_value * near:
                self._look_at_every(near) if few else self._rearrange(0)
        if self._quick:
            super().tighten()

    def _look_at_every(self, near: float) -> None:
        """Try other warm-ups with the best stages that there are at usual ones."""
        limit, over = self.state.best_value * near, self.over()
        search = Exhaustive(self._pricing(), limit=limit, nodes=tuning.CERTAIN, stop=over, take=lambda _: limit)
        search.run()
        for each in sorted(search.found, key=lambda each: each.value_s)[: tuning.REARRANGED_TRIED]:
            if not over():
                self._go_along(each.stages)

    def _pricing(self) -> _SimulatedPricing:
        return _SimulatedPricing(SetMemory(self.problem, self.micro_batches), self.schedule, self.plans.worth)

    def _rearrange(self, n: int) -> bool:
        """The n-th local search over convex stages, from the best plan, then along its order; True: it found more."""
        before, over = self.best, self.over()
        if before is None or over():
            return False
        annealing = Annealing(self._pricing(), seed=self.state.options.seed + n, stop=over)
        first = annealing.start(of_plan(self.problem, before.plan))
        if first is not None:
            self._rearranged = True
            self._go_along(annealing.run(first).stages)
        return self.best is not before

    def _go_along(self, stages: Stages) -> None:
        """Offer stages, and the best of the intervals near them in an order of which they are intervals."""
        problem = along(self.problem, (i for _, mask in stages for i in bits(mask)))
        pipelines = PipelineCandidate(self.state, self.schedule, self.micro_batches, problem)
        pipelines.improve_from([(self.problem.workers[w].name, mask.bit_count()) for w, mask in stages])
        if pipelines.best is not None:
            best = pipelines.best
            self.offer(best.value, lambda: best.plan, LOCAL)

    def prove(self) -> None:
        """Simulate pipelines; then bound a step by the work and the paths of every placement.

        Before that the best plan of all is rearranged further, now that each near it has been rearranged once.
        """
        for n in range(1, tuning.REARRANGED) if self._rearranged else ():
            if self.best_value > self.state.best_value or not self._rearrange(n):
                break
        if self._quick:
            super().prove()
        self.cut_short = False  # more of the intervals of one order prove nothing about other stages
        if self.decided or self.objective != "step" or self.state.clock.left_s <= 0:
            return
        memory = SetMemory(self.problem, self.micro_batches)
        if PlacementModel.is_small(memory):
            self.bound_by(PlacementModel(memory, one_stage=True, unit=self.state.unit, turns=False))

    def _nothing_fits(self) -> bool:
        """True if it is proven that no convex stages fit, with as few micro-batches in flight as there can be.

        GPipe with one micro-batch holds what 1F1B with one in flight holds, so its exhaustive search tells.
        """
        problem, options = self.problem, self.problem.options
        least = 1 if self.schedule == "1f1b" else self.micro_batches
        asked = replace(
            options, objective="step", schedule="gpipe", batch_size=least * self.size, micro_batches=least,
            max_step_s=None,
        )  # fmt: skip
        clock = SolveClock(tuning.FITS_S, within=problem.clock)
        state = SearchState(Problem(problem.profile, asked, problem.cost, clock=clock), self.state.watch)
        candidate = FreeCandidate(state, "gpipe", least)
        state.candidates = [candidate]
        with suppress(OutOfTime):
            for phase in (candidate.price, candidate.start, candidate.tighten, candidate.prove):
                if not candidate.decided and state.best is None:
                    clock.check()
                    phase()
        if state.best is not None:
            self._adapt(state.best.plan, least)
        return state.best is None and candidate.decided

    def _adapt(self, plan: Plan, in_flight: int) -> None:
        """Offer stages that fit with so few micro-batches in flight."""
        problem = self.problem
        adapted = replace(
            plan, objective=self.objective, schedule=self.schedule, workload=problem.workload,
            micro_batches=self.micro_batches, micro_batch_size=self.size,
            stages=tuple(
                replace(stage, in_flight=in_flight if self.schedule == "1f1b" else None) for stage in plan.stages
            ),
        )  # fmt: skip
        if problem.fits(adapted):
            self.plans.offer_priced(adapted, EXHAUSTIVE)  # inf where a gradient or a tie needs a link that is missing
