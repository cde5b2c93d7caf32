"""Candidates whose stages have any shape: several stages a worker, or one convex set of a branched graph.

What is proven: of a small instance the optimum over every placement, every order of stages and every choice of
rematerialisation, by exhaustive search, unless it runs out of nodes or time. Of a larger one plans come from local
search, and the bound, from a relaxation (`ilp/placements.py`), holds for every placement of the candidate.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.solver.free.annealing import Annealing
from assigner.solver.free.exhaustive import Exhaustive
from assigner.solver.free.pricing import SteadyPricing, StepPricing
from assigner.solver.free.starts import along, of_plan, orders, starts
from assigner.solver.ilp.placements import PlacementModel
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import EXHAUSTIVE, LOCAL, TOTAL_WORK, CandidateSearch
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.set_memory import SetMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.terms import Schedule
    from assigner.solver.free.pricing import Arrangement, BoundedPricing, Stages
    from assigner.solver.methods.candidate import SearchState


class FreeCandidate(CandidateSearch):
    """M micro-batches breadth first, any number of stages a worker; under another schedule one convex stage a worker.

    The last for the step under GPipe, and for the steady state under GPipe or 1F1B.

    Attributes:
        one_stage: A worker has at most one stage.
        small: There are few enough placements for exhaustive search.
        certain: So few that it is sure to end.
    """

    def __init__(self, state: SearchState, schedule: Schedule, micro_batches: int) -> None:
        super().__init__(state, micro_batches)
        self.schedule, self.one_stage = schedule, schedule != "interleaved"
        self._steady = self.problem.options.objective == "throughput"
        self.memory = SetMemory(self.problem, micro_batches)
        self._starts: list[Arrangement] = []
        self._placements = math.prod(max(1, len(homes)) for homes in self.memory.table.homes)
        self.small = self._placements <= (tuning.SMALL_CONVEX if self.one_stage else tuning.SMALL)
        self.certain = self._placements <= (tuning.CERTAIN_STEADY if self._steady else tuning.CERTAIN)

    def _take(self, found: Arrangement, found_by: str = LOCAL) -> float:
        self.offer(found.value_s, lambda: found.plan(self.schedule), found_by)
        return self.state.target

    @property
    def closable(self) -> bool:
        """As `CandidateSearch` has it: all placements can be looked at, of the steady state in a second or two."""
        return self._placements <= tuning.CERTAIN if self._steady else self.small

    @cached_property
    def pricing(self) -> BoundedPricing:
        """What a placement is worth."""
        if self._steady:
            return SteadyPricing(self.memory, falling=self.schedule == "1f1b")
        return StepPricing(self.memory, one_stage=self.one_stage)

    def _starting(self) -> Iterator[Stages]:
        """Placements to start from, some of which may not fit."""
        state, table = self.state, self.memory.table
        if not self._steady:
            yield from starts(state, table, loops=not self.one_stage)
            return
        for order in orders(table):
            pipelines = PipelineCandidate(state, self.schedule, self.micro_batches, along(self.problem, order))
            pipelines.begin()
            if pipelines.best is not None:
                yield of_plan(self.problem, pipelines.best.plan)
        if state.best is not None:
            yield of_plan(self.problem, state.best.plan)

    def price(self) -> None:
        """Bound by the longest path and the perfect split."""
        table = self.memory.table
        bound, _ = self.pricing.least([-1] * len(self.problem.order), [0] * len(table.names), 0.0)
        self.bound = bound
        self.decided = math.isinf(bound)

    def start(self) -> None:
        """Offer good placements at once."""
        state = self.state
        self.raise_bound(self.bound, TOTAL_WORK)
        if self.decided:
            return
        if self.certain and state.best is not None:
            return
        annealing = self._annealing()
        found = {each.stages: each for each in map(annealing.start, self._starting()) if each}
        for first in sorted(found.values(), key=lambda each: each.value_s)[: tuning.STARTS]:
            self._take(first)
            self._starts.append(first)

    def tighten(self) -> None:
        """Bound a larger instance by the load model's relaxation."""
        if not self.certain and PlacementModel.is_small(self.memory):
            self.bound_by(self._model(), relaxed=True)

    def prove(self) -> None:
        """Local search, unless the instance is tiny; then look at every placement, or raise the bound by the ILP."""
        state = self.state
        for first in [] if self.certain else self._starts:
            if state.clock.left_s > 0:
                self._take(self._annealing().run(first))
        if self.small and state.clock.left_s > 0:
            self.look_at_all()
        if not self.decided and state.clock.left_s > 0 and PlacementModel.is_small(self.memory):
            self.bound_by(self._model())

    def _annealing(self) -> Annealing:
        return Annealing(self.pricing, seed=self.state.options.seed, stop=self.over())

    def look_at_all(self) -> None:
        """Exhaustive search, as far as the nodes and the time reach."""
        state = self.state
        search = Exhaustive(
            self.pricing, limit=state.target, nodes=tuning.NODES * self.effort, stop=self.over(),
            take=lambda found: self._take(found, EXHAUSTIVE),
        )  # fmt: skip
        self.cut_short = not search.run()
        self.raise_bound(min(search.floor, search.limit, state.target), EXHAUSTIVE)

    def _model(self) -> PlacementModel:
        return PlacementModel(
            self.memory, one_stage=self.one_stage, unit=self.state.unit, turns=self.schedule != "1f1b",
            steady=self._steady,
        )  # fmt: skip
