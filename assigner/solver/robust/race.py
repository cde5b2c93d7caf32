"""Plans against draws of their measurements: who is best in each, of all plans that were found for any."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from assigner.formats.plan import Plan
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import compared_value
from assigner.schedule.timing import step_s
from assigner.solver.options import SolveOptions


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
