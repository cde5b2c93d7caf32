"""Rows of linear models, as PuLP has them."""

from __future__ import annotations

from collections import defaultdict

import pulp

Terms = dict[pulp.LpVariable, float]
"""A linear expression: coefficients by variable."""


def add(*parts: tuple[float, Terms]) -> Terms:
    """The weighted sum of linear expressions."""
    total: Terms = defaultdict(float)
    for weight, terms in parts:
        for variable, value in terms.items():
            total[variable] += weight * value
    return total


class LinearModel:
    """A model that is minimised.

    Args:
        name: Of the model.
        unit: Seconds of one unit of its objective; about a thousandth of the step time scales it well.

    Attributes:
        problem: The model as PuLP has it.
    """

    def __init__(self, name: str, *, unit: float) -> None:
        self.unit = unit
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._rows = 0

    def add_row(self, terms: Terms, sense: int, bound: float) -> None:
        """A row; one without terms that cannot hold makes the model infeasible."""
        terms = {variable: value for variable, value in terms.items() if value}
        if not terms:
            if not ((sense == pulp.LpConstraintEQ and bound) or (sense == pulp.LpConstraintGE and bound > 0)):
                return
            terms = {self.problem.add_variable(f"never{self._rows + 1}", 0, 0): 1.0}
        self._rows += 1
        expression = pulp.LpAffineExpression(terms)
        self.problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{self._rows:06d}", bound))

    def above(self, high: Terms, low: Terms, *, slack: float = 0.0) -> None:
        """High >= low - slack."""
        self.add_row(add((1.0, high), (-1.0, low)), pulp.LpConstraintGE, -slack)
