"""Plans that a chosen plan is held against where the measurements are drawn anew, and who is best in each draw.

They are good ones, found quickly and without proof: baselines, and what the search finds first for a draw. Each is a
rival in every draw, whichever it was found for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import compared_value
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.problem.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.profile import Profile

    Rival = Callable[[Profile], Plan | None]
    """From a drawn profile to a plan that may be better there than the chosen one; None: none was found."""


def resolver(plan: Plan, options: SolveOptions) -> Rival:
    """Solve again for a draw, as far as the solver's first plans: what its dynamic programs and local search find.

    The chosen plan is the first one to beat, which leaves out what is proven not to beat it. Looked at are all
    schedules that the options allow, at the plan's number of micro-batches and the next smaller and larger one.

    Args:
        plan: The chosen plan.
        options: What it was solved with, resolved (hints.py).
    """
    from assigner.solver.candidates.state import GIVEN, Proposal
    from assigner.solver.search.search import Search

    hasty = replace(options, gap=0.0, time_limit=min(tuning.RESOLVE_S, options.time_limit))

    def rival(drawn: Profile) -> Plan | None:
        search = Search(drawn, hasty)
        value = value_of(plan, options, search.problem.cost)
        search.state.best = Proposal(plan, value, GIVEN) if math.isfinite(value) else None
        search.run_hastily(neighbours(plan.micro_batches, sorted({each.micro_batches for each in search.candidates})))
        return None if search.state.best is None else search.state.best.plan

    return rival


def neighbours(number: int, offered: Sequence[int]) -> Sequence[int]:
    """Of growing numbers, the one asked for with the next smaller and larger one, as far as they are offered."""
    at = bisect_left(offered, number)
    return offered[max(0, at - 1) : at + 2]


def value_of(plan: Plan, options: SolveOptions, cost: CostModel) -> float:
    """What a search with these options compares, the less the better; inf where the step is longer than asked for."""
    step, most = step_s(plan, cost), options.max_step_s
    if most is not None and step > most:
        return math.inf
    return compared_value(plan, options.objective, cost, step_s=step)


@dataclass
class Draw:
    """One draw of the measurements.

    Args:
        cost: Its prices.
        counts: The numbers of micro-batches that it can price plausibly.
        value: The chosen plan's value.
        best: The least value of any plan so far.
    """

    cost: CostModel
    counts: frozenset[int]
    value: float
    best: float

    @property
    def regret(self) -> float:
        """How much worse the chosen plan is than the best one, as a share of the best one's value."""
        if self.value == self.best:
            return 0.0
        return self.value / self.best - 1 if self.best > 0 else math.inf


@dataclass
class Race:
    """All plans found against all draws: a plan found for one draw is a rival in every other.

    Left out of a draw are rivals at a number of micro-batches that a search would not look at there, since the line
    through the draw's measurements promises what no machine does (`SolveOptions.counts`).

    Args:
        options: Objective and numbers of micro-batches.
        plans: The chosen one, then others, each once.
        draws: What was drawn so far.
    """

    options: SolveOptions
    plans: list[Plan]
    draws: list[Draw] = field(default_factory=list)

    def add(self, cost: CostModel, found: Plan | None) -> None:
        """Take a draw, and the plan that was found for it, if any."""
        if found is not None and not any(_same(found, plan) for plan in self.plans):
            self.plans.append(found)
            for draw in self.draws:
                draw.best = min(draw.best, self._rival_value(found, draw))
        value = value_of(self.plans[0], self.options, cost)
        draw = Draw(cost, frozenset(self.options.counts(cost)), value, value)
        draw.best = min([value, *(self._rival_value(plan, draw) for plan in self.plans[1:])])
        self.draws.append(draw)

    def _rival_value(self, plan: Plan, draw: Draw) -> float:
        return value_of(plan, self.options, draw.cost) if plan.micro_batches in draw.counts else math.inf


def _same(one: Plan, other: Plan) -> bool:
    """True if two plans run the same: their predictions and reports play no part."""
    return (one.schedule, one.micro_batches, one.micro_batch_size, one.stages, one.orders) == (
        other.schedule, other.micro_batches, other.micro_batch_size, other.stages, other.orders,
    )  # fmt: skip
