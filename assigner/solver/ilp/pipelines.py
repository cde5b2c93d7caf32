"""What every ILP over pipelines has: a path of columns through the positions, with the boundaries between them.

The package's docstring has sets, variables and rows. Memory, and all hints but the number of workers, say which columns
and boundaries there are. The objective is the schedule's: `gpipe.py` has GPipe's, `one_f_one_b.py` 1F1B's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING

import pulp

from assigner.solver.ilp.linear import LinearModel, add, capped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.solver.ilp.linear import Terms
    from assigner.solver.limits.clock import SolveClock
    from assigner.solver.problem.prices import Hop, PriceTable
    from assigner.solver.problem.stage_options import StageOption

FORWARD, BACKWARD = "F", "B"


class PipelineModel(LinearModel, ABC):
    """The ILP over some of an instance's columns.

    Args:
        table: Prices.
        columns: The columns that may be used.
        unit, clock: As of `LinearModel`.
    """

    def __init__(
        self, table: PriceTable, columns: Sequence[StageOption], *, unit: float, clock: SolveClock | None = None
    ) -> None:
        super().__init__("pipelines", unit=unit, clock=clock)
        self.table, self.columns = table, list(columns)
        self.n, self.more = len(table.problem.order), table.micro_batches - 1
        self.x = [
            self.problem.add_variable(f"x{j:06d}_{column.first}_{column.last}_{column.group}", 0, 1, pulp.LpInteger)
            for j, column in enumerate(self.columns)
        ]
        self._starting: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._ending: dict[tuple[int, int], list[int]] = defaultdict(list)
        for j, column in enumerate(self.columns):
            self._starting[column.first, column.group].append(j)
            self._ending[column.last + 1, column.group].append(j)
        self.y: dict[tuple[int, int, int], pulp.LpVariable] = {
            key: self.problem.add_variable(f"y_{key[0]}_{key[1]}_{key[2]}", 0, 1)
            for key in table.hops
            if self._ending.get(key[:2]) and self._starting.get((key[0], key[2]))
        }
        self.at: dict[int, list[tuple[pulp.LpVariable, Hop]]] = defaultdict(list)
        for key, variable in self.y.items():
            self.at[key[0]].append((variable, table.hops[key]))
        self.least = LeastBusy(table)
        self._flow()
        self.objective = capped(self._objective())
        self.problem.setObjective(pulp.LpAffineExpression(self.objective))

    def _flow(self) -> None:
        groups = range(len(self.table.groups))
        self.add_row({self.x[j]: 1.0 for j in self.first_columns(0)}, pulp.LpConstraintEQ, 1.0)
        leaving: dict[tuple[int, int], Terms] = defaultdict(dict)
        entering: dict[tuple[int, int], Terms] = defaultdict(dict)
        for (i, left, right), variable in self.y.items():
            leaving[i, left][variable] = entering[i, right][variable] = -1.0
        for i in range(1, self.n):
            for k in groups:
                self.add_row(
                    {**leaving[i, k], **{self.x[j]: 1.0 for j in self._ending.get((i, k), ())}},
                    pulp.LpConstraintEQ,
                    0.0,
                )
                self.add_row(
                    {**entering[i, k], **{self.x[j]: 1.0 for j in self._starting.get((i, k), ())}},
                    pulp.LpConstraintEQ, 0.0,
                )  # fmt: skip
        for k in groups:
            members = {self.x[j]: 1.0 for j, column in enumerate(self.columns) if column.group == k}
            self.add_row(members, pulp.LpConstraintLE, float(len(self.table.groups[k])))
        most = self.table.most_workers
        if most < min(self.n, sum(map(len, self.table.groups))):
            self.add_row(dict.fromkeys(self.x, 1.0), pulp.LpConstraintLE, float(most))

    def first_columns(self, p: int) -> Iterable[int]:
        """Numbers of the columns that start at a position."""
        return (j for k in range(len(self.table.groups)) for j in self._starting.get((p, k), ()))

    @abstractmethod
    def _objective(self) -> Terms:
        """What is minimised, in the model's unit; makes the variables and rows that it needs."""

    def boundary(self, i: int, price: Callable[[Hop], float]) -> Terms:
        """What boundary i costs, in the model's unit; nothing where there is none."""
        return {variable: price(hop) / self.unit for variable, hop in self.at[i]}

    def covering(self) -> list[list[int]]:
        """Numbers of the columns over each position, of which exactly one is used."""
        found: list[list[int]] = [[] for _ in range(self.n)]
        for j, column in enumerate(self.columns):
            for i in range(column.first, column.last + 1):
                found[i].append(j)
        return found

    def cut(self, columns: Iterable[StageOption], value_s: float) -> None:
        """The pipelines that use all of these columns take at least `value_s` seconds; inf: they do not exist."""
        number = {column: j for j, column in enumerate(self.columns)}
        used = {self.x[number[column]]: 1.0 for column in columns}
        if value_s == float("inf"):
            self.add_row(used, pulp.LpConstraintLE, len(used) - 1.0)
            return
        value = value_s / self.unit
        self.add_row(add((1.0, self.objective), (-value, used)), pulp.LpConstraintGE, -value * (len(used) - 1))

    def chosen(self) -> tuple[StageOption, ...]:
        """The columns at 1 in the solution found, in order of position."""
        return tuple(sorted((c for c, x in zip(self.columns, self.x, strict=True) if x.varValue and x.varValue > 0.5),
                            key=lambda column: column.first))  # fmt: skip


def busy_s(hop: Hop, way: str, side: int) -> float:
    """Seconds for which a boundary keeps its left worker (side 0) or its right one (1) busy, one way."""
    return (hop.forward_busy if way == FORWARD else hop.backward_busy)[side]


class LeastBusy:
    """The least seconds that a boundary can keep a worker of a group busy, whoever is at its other side."""

    def __init__(self, table: PriceTable) -> None:
        self._least: dict[tuple[str, int, int, int], float] = {}
        for (i, left, right), hop in table.hops.items():
            for way in (FORWARD, BACKWARD):
                for side, group in ((0, left), (1, right)):
                    key, busy = (way, side, i, group), busy_s(hop, way, side)
                    self._least[key] = min(busy, self._least.get(key, busy))

    def of(self, way: str, side: int, i: int, group: int) -> float:
        """At boundary i, of a worker of the group at its left (side 0) or right (1)."""
        return self._least.get((way, side, i, group), 0.0)

    def left(self, column: StageOption, way: str) -> float:
        """At the column's left boundary, where it is the right worker."""
        return self.of(way, 1, column.first, column.group)

    def right(self, column: StageOption, way: str) -> float:
        """At the column's right boundary, where it is the left worker."""
        return self.of(way, 0, column.last + 1, column.group)
