"""Settings whose stages have any shape: several stages a worker, or one convex set of a branched graph.

What is proven: of a small instance the optimum over every placement, every order of stages and every choice of
rematerialisation, by exhaustive search, unless it runs out of nodes or time. Of a larger one plans come from local
search, and the bound, from a relaxation (`ilp/placements.py`), holds for every placement of the setting.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.solver.contest.contest import EXHAUSTIVE, LOCAL, TOTAL_WORK
from assigner.solver.contest.setting import Setting
from assigner.solver.free.annealing import Annealing
from assigner.solver.free.exhaustive import Exhaustive
from assigner.solver.free.pricing import StepPricing
from assigner.solver.free.starts import starts
from assigner.solver.ilp.placements import PlacementModel
from assigner.solver.limits import tuning
from assigner.solver.problem.set_memory import SetMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.formats.terms import Schedule
    from assigner.solver.contest.contest import Contest
    from assigner.solver.free.arrangement import Arrangement, Stages
    from assigner.solver.free.pricing import BoundedPricing


class FreeSetting(Setting):
    """The breadth-first schedule with M micro-batches, any number of stages a worker.

    Attributes:
        room: Prices and memory.
        placements: How many ways there are to put the partitions on workers.
        small: Few enough for exhaustive search.
        certain: So few that it is sure to end.
    """

    schedule: Schedule = "interleaved"
    one_stage = False
    most_placements = tuning.SMALL
    most_certain = tuning.CERTAIN

    def __init__(self, contest: Contest, micro_batches: int) -> None:
        super().__init__(contest, micro_batches)
        self.room = SetMemory(self.problem, micro_batches)
        self._starts: list[Arrangement] = []
        self.placements = math.prod(max(1, len(homes)) for homes in self.room.table.homes)
        self.small, self.certain = self.placements <= self.most_placements, self.placements <= self.most_certain

    def _take(self, found: Arrangement, found_by: str = LOCAL) -> float:
        self.offer(found.value_s, lambda: found.plan(self.schedule), found_by)
        return self.contest.target

    @property
    def closable(self) -> bool:
        """As `Setting` has it: where every placement can be looked at."""
        return self.small

    @cached_property
    def pricing(self) -> BoundedPricing:
        """What a placement is worth."""
        return StepPricing(self.room, one_stage=self.one_stage)

    def _starting(self) -> Iterable[Stages]:
        """Placements to start from, some of which may not fit."""
        return starts(self.contest, self.room.table, loops=not self.one_stage)

    def price(self) -> None:
        """Bound by the longest path and the perfect split."""
        table = self.room.table
        bound, _ = self.pricing.least([-1] * len(self.problem.order), [0] * len(table.names), 0.0)
        self.bound = bound
        self.decided = math.isinf(bound)

    def start(self) -> None:
        """Offer good placements at once."""
        contest = self.contest
        self.raise_bound(self.bound, TOTAL_WORK)
        if self.decided:
            return
        if self.certain and contest.best is not None:
            return
        annealing = self._annealing()
        found = {each.stages: each for each in map(annealing.start, self._starting()) if each}
        for first in sorted(found.values(), key=lambda each: each.value_s)[: tuning.STARTS]:
            self._take(first)
            self._starts.append(first)

    def tighten(self) -> None:
        """Bound a larger instance by the load model's relaxation."""
        model = None if self.certain else self._model()
        if model is not None:
            self.bound_by(model, relaxed=True)

    def prove(self) -> None:
        """Local search, unless the instance is tiny; then look at every placement, or raise the bound by the ILP."""
        contest = self.contest
        for first in [] if self.certain else self._starts:
            if contest.clock.left_s > 0:
                self._take(self._annealing().run(first))
        if self.small and contest.clock.left_s > 0:
            self.look_at_all()
        model = None if self.decided or contest.clock.left_s <= 0 else self._model()
        if model is not None:
            self.bound_by(model)

    def _annealing(self) -> Annealing:
        return Annealing(self.pricing, seed=self.contest.options.seed, stop=self.over())

    def look_at_all(self) -> None:
        """Exhaustive search, as far as the nodes and the time reach."""
        contest = self.contest
        search = Exhaustive(
            self.pricing, limit=contest.target, nodes=tuning.NODES * self.effort, stop=self.over(),
            take=lambda found: self._take(found, EXHAUSTIVE),
        )  # fmt: skip
        self.cut_short = not search.run()
        self.raise_bound(min(search.floor, contest.target), EXHAUSTIVE)

    def _model(self) -> PlacementModel | None:
        return PlacementModel.within(
            self.room, one_stage=self.one_stage, unit=self.contest.unit, turns=self.schedule != "1f1b",
            steady=self.problem.options.objective == "throughput",
        )  # fmt: skip


class ConvexSetting(FreeSetting):
    """GPipe with M micro-batches, one stage a worker, of a graph whose stages need not follow one order."""

    schedule: Schedule = "gpipe"
    one_stage = True
    most_placements = tuning.SMALL_CONVEX
