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
from assigner.solver import tuning
from assigner.solver.chain.formula import turn_steps_s
from assigner.solver.chain.placement import Placement, beam, hops_of
from assigner.solver.chain.pruning import chain_bounds
from assigner.solver.contest import DYNAMIC_PROGRAM, INTEGER_PROGRAM, LOCAL, PROVEN, RELAXATION, TOTAL_WORK
from assigner.solver.fleet.hierarchy import Hierarchy
from assigner.solver.ilp.gpipe import GPipeModel
from assigner.solver.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.contest import Contest
    from assigner.solver.ilp.backend import Outcome
    from assigner.solver.prices import StageOption
    from assigner.solver.problem import Problem

BEAM = "beam search"
"""How a plan was found."""


class GPipeSetting(Setting):
    """GPipe, one stage a worker, with M micro-batches.

    Attributes:
        instance: The prices.
        columns: Those that may be in a better plan; None: not looked at yet.
        floor: Least bound of the columns that were left out.
        statement: The ILP of its step time.
        cuts: Columns, with the least seconds that a pipeline with all of them takes, where the ILP says less.
    """

    schedule = "gpipe"
    statement = GPipeModel

    def __init__(self, contest: Contest, micro_batches: int, problem: Problem | None = None) -> None:
        super().__init__(contest, micro_batches, problem)
        self.instance = self.problem.prices(micro_batches)
        self.columns: list[StageOption] | None = None
        self.floor = math.inf
        self.cuts: list[tuple[Sequence[StageOption], float]] = []
        self._narrowed = -math.inf  # the target at which the columns were chosen
        self._placement: Placement | None = None
        self._hierarchy = Hierarchy(
            self.instance, take=lambda each: self._take(each, DYNAMIC_PROGRAM), target=lambda: contest.target,
            watch=self._tell,
        )  # fmt: skip

    @cached_property
    def _small(self) -> bool:
        """Whether the ILP can carry it."""
        n = len(self.problem.order)
        return n * (n + 1) // 2 * len(self.instance.groups) <= tuning.MOST_COLUMNS

    @property
    def closable(self) -> bool:
        """As `Setting` has it: by the number of columns."""
        n = len(self.problem.order)
        return n * (n + 1) // 2 * len(self.instance.groups) <= tuning.CLOSE_COLUMNS

    @cached_property
    def _coarse(self) -> bool:
        """Whether the hierarchy goes first: with hardly any gap allowed it rarely proves anything."""
        return self.contest.gap >= tuning.COARSE_GAP or not self._small

    def _take(self, placement: Placement, found_by: str) -> None:
        if placement.step_s < self.best_value:
            self._placement = placement
        self.offer(placement.step_s, placement.plan, found_by)

    def price(self) -> None:
        """Price the columns; the sums alone give a first bound, inf where no chain of stages fits."""
        if self._coarse:
            self.bound = self._hierarchy.bound
        else:
            bounds = chain_bounds(self.instance)
            self.bound = min((bound for column, bound in bounds.items() if column.first == 0), default=math.inf)
        self.decided = math.isinf(self.bound)

    def start(self) -> None:
        """Take the plans of the beam or, of a chain and of what is large, the hierarchy's if there are none yet."""
        self.raise_bound(self.bound, TOTAL_WORK)
        if self.decided:
            return
        if self._coarse and math.isinf(self.contest.best_value) and not self._hierarchy.start(self.contest.until):
            self.raise_bound(math.inf, DYNAMIC_PROGRAM)
        if self._begins_with_beam and not self.decided:
            self._beam()

    def improve(self) -> None:
        """Local search from the beam's best plan."""
        if self._begins_with_beam:
            self._climb()

    @cached_property
    def _begins_with_beam(self) -> bool:
        """Whether the hierarchy does not find good plans by itself."""
        return not self._coarse or (self._small and not self.problem.exact)

    def _beam(self) -> None:
        for placement in beam(self.instance):
            self._take(placement, BEAM)

    def _climb(self) -> None:
        if self._placement is not None:
            self._take(self._placement.improved(until=self.contest.until), LOCAL)

    def tighten(self) -> None:
        """Bound the setting: by the hierarchy, or by the relaxation of the ILP."""
        if self._coarse:
            self._descend(self.contest.share_s)
        else:
            self._narrow()

    def _narrow(self) -> None:
        """Bound the setting by the relaxation, and drop columns by their reduced costs."""
        kept, floor, outcome = self._relaxed(self.contest.target)
        self.columns, self.floor, self._narrowed = kept, floor, self.contest.target
        if outcome.finished:
            self.raise_bound(min(outcome.bound, floor), RELAXATION)

    def _tell(self) -> None:
        """While the hierarchy searches: its bound counts, and the user hears of it."""
        self.raise_bound(self._hierarchy.bound, DYNAMIC_PROGRAM)
        self.contest.watch()

    def _descend(self, seconds: float) -> None:
        """Search the hierarchy for a while."""
        try:
            self._hierarchy.search(time.monotonic() + seconds)
        finally:  # also when interrupted
            self.raise_bound(self._hierarchy.bound, DYNAMIC_PROGRAM)

    def _relaxed(self, target: float) -> tuple[list[StageOption], float, Outcome]:
        """Solve the relaxation, in seconds.

        Returns:
            The columns that may be in a plan below `target`, the least bound of the others, and the outcome.
        """
        bounds = chain_bounds(self.instance)
        columns = [column for column, bound in bounds.items() if bound < target]
        floor = min((bound for bound in bounds.values() if bound >= target), default=math.inf)
        model = GPipeModel(self.instance, columns, unit=self.contest.unit)
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
            if not self._begins_with_beam:
                self._beam()
                self._climb()
            self._narrow()
        if self.decided or self.columns is None:
            return
        contest = self.contest
        model = GPipeModel(self.instance, self.columns, unit=contest.unit)
        cuts = 0
        while contest.left_s > 0:
            target = contest.target
            if self.bound >= target:
                self.decided = True
                return
            outcome = contest.backend.search(
                model.problem,
                gap=contest.gap,
                cutoff=target / model.unit,
                time_limit=contest.share_s,
                nodes=contest.nodes,
            ).scaled(model.unit)
            contest.proofs.add(INTEGER_PROGRAM)
            self.bound = max(self.bound, min(outcome.bound, self.floor))
            if not outcome.found:
                self.decided = outcome.finished
                return
            placement = Placement.of(self.instance, model.chosen())
            _check(placement, outcome)
            self._take(placement, INTEGER_PROGRAM)
            if placement.step_s <= outcome.value * (1 + 1e-9):
                self.decided = outcome.finished
                return
            cuts += 1
            if not self.problem.exact and cuts > tuning.GRAPH_CUTS * self.effort:
                self.cut_short = True
                return
            self._cut(model, placement)

    def _cut(self, model: GPipeModel, placement: Placement) -> None:
        """Tell the model what a pipeline really takes."""
        columns = placement.columns
        if self.problem.exact:
            hops = hops_of(placement.instance, columns)
            assert hops is not None
            steps = turn_steps_s(columns, hops, placement.instance.micro_batches)
            turn = max(range(len(steps)), key=steps.__getitem__)
            columns = columns[: turn + 2]  # the turn at t knows the stages up to t and the boundary behind it
        model.cut(columns, placement.step_s)
        self.cuts.append((columns, placement.step_s))

    def settle(self) -> bool:
        """With no gap left: have the ILP find the best plan; whether that came to an end."""
        self.price()
        if not self.decided:
            self.tighten()
        if not self.decided:
            self.prove()
        return self.decided

    @property
    def stage_options(self) -> Sequence[StageOption]:
        """Every stage option: the columns of its ILP."""
        return tuple(self.instance.options.values())


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
