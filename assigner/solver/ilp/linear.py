"""Rows of linear models, as PuLP has them."""

from __future__ import annotations

from collections import defaultdict

import pulp

from assigner.solver.limits.clock import OutOfTime, SolveClock

Terms = dict[pulp.LpVariable, float]
"""A linear expression: coefficients by variable."""

LARGEST = 1e6
"""The largest coefficient of a model, where the best plan has about 1,000: what takes longer is as bad as this.

HiGHS leaves out rows with coefficients of 1e15 or more, and beside some of 1e10 its tolerances are no longer small. A
message over a link that is as good as dead (1e13 s) has such ones.
"""


def add(*parts: tuple[float, Terms]) -> Terms:
    """The weighted sum of linear expressions."""
    total: Terms = defaultdict(float)
    for weight, terms in parts:
        for variable, value in terms.items():
            total[variable] += weight * value
    return total


def capped(terms: Terms) -> Terms:
    """What is minimised without coefficients above `LARGEST`: its optimum is a bound of the one with them."""
    return {variable: min(value, LARGEST) for variable, value in terms.items()}


class LinearModel:
    """A model that is minimised.

    Args:
        name: Of the model.
        unit: Seconds of one unit of its objective; about a thousandth of the step time scales it well.
        clock: When it is of no use any more; None: never.

    Attributes:
        problem: The model as PuLP has it.
    """

    def __init__(self, name: str, *, unit: float, clock: SolveClock | None = None) -> None:
        self.unit = unit
        self._clock = SolveClock(within=clock)
        self._stated_s = 0.0
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._rows = 0

    def add_row(self, terms: Terms, sense: int, bound: float) -> None:
        """A row; one without terms that cannot hold makes the model infeasible.

        An inequality with coefficients above `LARGEST` is weakened: those that make it hard to hold are capped, and
        with one that makes it easy it is left out. So every bound of the model stays one.

        Raises:
            OutOfTime: the time is over.
        """
        self._clock.check()
        terms = {variable: value for variable, value in terms.items() if value}
        if not terms:
            if not ((sense == pulp.LpConstraintEQ and bound) or (sense == pulp.LpConstraintGE and bound > 0)):
                return
            terms = {self.problem.add_variable(f"never{self._rows + 1}", 0, 0): 1.0}
        if sense != pulp.LpConstraintEQ:
            hard = 1.0 if sense == pulp.LpConstraintLE else -1.0
            if any(hard * value < -LARGEST for value in terms.values()):
                return
            terms = {variable: hard * value for variable, value in capped(add((hard, terms))).items()}
        self._rows += 1
        expression = pulp.LpAffineExpression(terms)
        self.problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{self._rows:06d}", bound))
        self._stated_s = self._clock.elapsed_s

    def above(self, high: Terms, low: Terms, *, slack: float = 0.0) -> None:
        """High >= low - slack."""
        self.add_row(add((1.0, high), (-1.0, low)), pulp.LpConstraintGE, -slack)

    def check(self) -> None:
        """Raise OutOfTime where less time is left than stating it took: PuLP takes about as long to hand it over."""
        if self._clock.left_s <= self._stated_s:
            raise OutOfTime
