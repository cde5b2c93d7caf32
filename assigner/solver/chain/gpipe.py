"""GPipe with one stage a worker: the segment ILP, with a beam's plans as its first bound.

For a chain the ILP's value is the simulated step time. For a graph, whose stages here are intervals of one order, it
is a lower bound, and the simulator prices what the ILP finds.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.errors import AssignerError
from assigner.solver.chain.beam import Beam
from assigner.solver.chain.formula import turn_steps_s
from assigner.solver.chain.improve import improve
from assigner.solver.chain.merged import MergedInstance
from assigner.solver.chain.model import SegmentModel
from assigner.solver.chain.placement import Placement, hops_of
from assigner.solver.chain.pruning import chain_bounds
from assigner.solver.contest import PROVEN
from assigner.solver.fleet.hierarchy import Hierarchy
from assigner.solver.instance import Instance
from assigner.solver.setting import Setting

if TYPE_CHECKING:
    from assigner.solver.backend import Outcome
    from assigner.solver.contest import Contest
    from assigner.solver.problem import Problem
    from assigner.solver.segments import Column

GRAPH_CUTS = 12
"""Of a graph, whose ILP is a lower bound, so many pipelines are cut off and priced at first."""

MERGE_GAP = 1e-3
"""With a smaller gap than this, merging workers of one kind rarely proves anything: it is left out."""


MOST_COLUMNS = 40_000
"""With more segments than this there is no ILP: the hierarchy finds the plan and bounds it."""


class GPipeSetting(Setting):
    """GPipe, one stage a worker, with M micro-batches.

    Attributes:
        instance: The prices.
        columns: Those that may be in a better plan; None: not looked at yet.
        floor: Least bound of the columns that were left out.
    """

    schedule = "gpipe"

    def __init__(self, contest: Contest, micro_batches: int, problem: Problem | None = None) -> None:
        super().__init__(contest, micro_batches, problem)
        self.instance = Instance(self.problem, micro_batches)
        self.columns: list[Column] | None = None
        self.floor = math.inf
        self._narrowed = -math.inf  # the target at which the columns were chosen
        self._placement: Placement | None = None
        self._hierarchy = Hierarchy(self.instance, take=self._take, target=lambda: contest.target, watch=self._tell)

    @cached_property
    def _small(self) -> bool:
        """Whether the ILP can carry it."""
        n = len(self.problem.order)
        return n * (n + 1) // 2 * len(self.instance.groups) <= MOST_COLUMNS

    @cached_property
    def _coarse(self) -> bool:
        """Whether the hierarchy goes first: with hardly any gap allowed it rarely proves anything."""
        return self.contest.options.gap >= MERGE_GAP or not self._small

    def _take(self, placement: Placement) -> None:
        if placement.step_s < self.best_value:
            self._placement = placement
        self.offer(placement.step_s, placement.plan)

    def price(self) -> None:
        """Price the columns; the sums alone give a first bound, inf where no chain of stages fits."""
        if self._coarse:
            self.bound = self._hierarchy.bound
        else:
            bounds = chain_bounds(self.instance)
            self.bound = min((bound for column, bound in bounds.items() if column.first == 0), default=math.inf)
        self.decided = math.isinf(self.bound)

    def prepare(self) -> None:
        """Take the beam's plans and what local search makes of the best."""
        if self.bound >= self.contest.target:
            self.decided = True
            return
        if self._coarse:
            if math.isinf(self.contest.best_value) and not self._hierarchy.start(self.contest.until):
                self.raise_bound(math.inf)
            if self.problem.exact or not self._small or self.decided:
                return
        self._beam()

    def _beam(self) -> None:
        for columns in Beam(self.instance).run():
            self._take(Placement.of(self.instance, columns))
        if self._placement is not None:
            self._take(improve(self._placement, until=self.contest.until))

    def relax(self) -> None:
        """Bound the setting: by the hierarchy, or by the relaxation of the ILP."""
        if self._coarse:
            self._descend(self.contest.share_s)
        else:
            self._narrow()

    def _narrow(self) -> None:
        """Bound the setting by the relaxation, and drop columns by their reduced costs."""
        if self.contest.options.gap >= MERGE_GAP:
            merged = MergedInstance(self.problem, self.micro_batches, self.instance)
            if merged.merges:
                self._bound_merged(merged)
                if self.decided or self.contest.left_s <= 0:
                    return
        kept, floor, outcome = self._relaxed(self.instance, self.contest.target)
        self.columns, self.floor, self._narrowed = kept, floor, self.contest.target
        if outcome.finished:
            self.raise_bound(min(outcome.bound, floor), "relaxation")

    def _tell(self) -> None:
        """While the hierarchy searches: its bound counts, and the user hears of it."""
        self.raise_bound(self._hierarchy.bound)
        if self.contest.backend.watch is not None:
            self.contest.backend.watch()

    def _descend(self, seconds: float) -> None:
        """Search the hierarchy for a while."""
        try:
            self._hierarchy.search(time.monotonic() + seconds)
        finally:  # also when interrupted
            self.raise_bound(self._hierarchy.bound)
            self.contest.proofs.add("dynamic program")

    def _relaxed(self, instance: Instance, target: float) -> tuple[list[Column], float, Outcome]:
        """Solve the relaxation, in seconds.

        Returns:
            The columns that may be in a plan below `target`, the least bound of the others, and the outcome.
        """
        bounds = chain_bounds(instance)
        columns = [column for column, bound in bounds.items() if bound < target]
        floor = min((bound for bound in bounds.values() if bound >= target), default=math.inf)
        model = SegmentModel(instance, columns, unit=self.contest.unit)
        outcome = self.contest.backend.relax(model.problem, time_limit=self.contest.left_s).scaled(model.unit)
        if not outcome.found:
            return columns, floor, outcome
        kept = []
        for column, x in zip(model.columns, model.x, strict=True):
            bound = outcome.value + max(0.0, x.dj or 0.0) * model.unit
            if bound < target * (1 + PROVEN):
                kept.append(column)
            else:
                floor = min(floor, bound)
        return kept, floor, outcome

    def _bound_merged(self, merged: MergedInstance) -> None:
        """Bound the setting by the problem in which workers of one kind are alike: its relaxation, then its ILP."""
        target = self.contest.target
        kept, floor, outcome = self._relaxed(merged, target)
        if not outcome.finished:
            return
        self.raise_bound(min(outcome.bound, floor), "relaxation")
        if self.decided:
            return
        model = SegmentModel(merged, kept, unit=self.contest.unit)
        found = self.contest.backend.search(
            model.problem,
            gap=self.contest.options.gap,
            cutoff=target / model.unit,
            time_limit=0.5 * self.contest.share_s,
        )
        self.raise_bound(min(found.bound * model.unit, floor), "ILP")

    def prove(self) -> None:
        """Find a better plan with the ILP, or prove that there is none.

        Of a chain the ILP's value is the step time, but for turns before the last stage; then, and for graphs, the
        pipeline found is priced, cut off and the ILP solved again. Where the ILP would be too large, the hierarchy
        goes on.
        """
        if not self._small:
            self._descend(self.contest.left_s)
            return
        if self._coarse and self._narrowed < self.contest.target and self.contest.left_s > 0:
            if self.problem.exact:
                self._beam()
            self._narrow()
        if self.decided or self.columns is None:
            return
        contest = self.contest
        model = SegmentModel(self.instance, self.columns, unit=contest.unit)
        cuts = 0
        while contest.left_s > 0:
            target = contest.target
            if self.bound >= target:
                self.decided = True
                return
            outcome = contest.backend.search(
                model.problem, gap=contest.options.gap, cutoff=target / model.unit, time_limit=contest.share_s
            ).scaled(model.unit)
            contest.proofs.add("ILP")
            self.bound = max(self.bound, min(outcome.bound, self.floor))
            if not outcome.found:
                self.decided = outcome.finished
                return
            placement = Placement.of(self.instance, model.chosen())
            _check(placement, outcome)
            self._take(placement)
            if placement.step_s <= outcome.value * (1 + 1e-9):
                self.decided = outcome.finished
                return
            cuts += 1
            if not self.problem.exact and cuts > GRAPH_CUTS * self.effort:
                self.cut_short = True
                return
            self._cut(model, placement)

    def _cut(self, model: SegmentModel, placement: Placement) -> None:
        """Tell the model what a pipeline really takes."""
        columns = placement.columns
        if self.problem.exact:
            hops = hops_of(placement.instance, columns)
            assert hops is not None
            steps = turn_steps_s(columns, hops, placement.instance.micro_batches)
            turn = max(range(len(steps)), key=steps.__getitem__)
            columns = columns[: turn + 2]  # the turn at t knows the stages up to t and the boundary behind it
        model.cut(columns, placement.step_s)


def _check(placement: Placement, outcome: Outcome) -> None:
    """Raise AssignerError if the ILP's objective and the closed formula disagree about a pipeline of a chain."""
    if not placement.instance.problem.exact:
        return
    hops = hops_of(placement.instance, placement.columns)
    assert hops is not None
    told = turn_steps_s(placement.columns, hops, placement.instance.micro_batches)[-1]
    low, high = outcome.bound, outcome.value
    if told > high * (1 + PROVEN) or placement.step_s < low * (1 - PROVEN):
        raise AssignerError(
            f"the ILP says {high:.9g} s (at least {low:.9g} s) for a pipeline that takes {told:.9g} s",
            hint="this is a bug in the solver: please report it with the profile",
        )
