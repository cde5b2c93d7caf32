"""The ILP of one micro-batch count: a path of segments with exact link prices.

Sets      positions i, p = 0 .. n - 1; groups k of like workers with `count[k]` members; columns j = (first, last, k)
Variables x[j] = 1: stage j is used; y[i, k, k'] = 1: the boundary before i lies between a worker of k and one of k'
          mF, mB: slowest server forward, backward; m[p]: slowest server backward among stages that start at p or later
          tail: by how much an update ends later than that of the first stage; o.F[i], ...: busy shares, see below

    minimise  sum (f + b) x + sum (c + c') y + (M-1) (mF + mB) + turn + update of the first stage + tail
    flow      sum of x starting at 0 = 1;  sum of x ending at i-1 on k = sum over k' of y[i,k,k'];
              sum of x starting at i on k' = sum over k of y[i,k,k']
    count     sum of x on k <= count[k];  sum of x <= the most workers asked for
    slowest   for each position i: sum over j covering i of g[j] x[j] <= mF   (exactly one of them is 1: this is what
              makes the relaxation strong);  for each boundary: sum c y[i] <= mF;  the same with h, c', mB
    loads     for each group: sum of g x on k <= count[k] mF;  the same with h, mB
    tail      for each p whose update could be the last to end:
              tail >= (T[p] + u x starting at p) - (T[0] + u x starting at 0),  T[p] = sums from p on + (M-1) m[p]

Busy shares: g[j] = f[j] + the least that the stage's two boundaries can keep its worker busy. What the boundary
chosen costs beyond that least is carried inwards: with `excess` of boundary i, and R the largest excess,
in[i] >= sum excess y[i] and in[i] >= in[i-1] - R (boundary at i), so in[i] is the excess of the stage that covers i,
whatever its length. `out` does the same from the right. Exact at whole x, and no rows at all where links are alike.

Turns before the last stage (formula.py) are left out: the optimum is a lower bound, and the search adds a cut for
the rare pipeline for which they matter. For graphs, only what lies on the spine is added up, so the optimum is a
lower bound; a row for each position adds M (f + b) + u of one worker.

Source: segments as in 4-solver.md 1; the strong rows are a disaggregation of the max (Padberg and Wolsey style).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pulp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.solver.instance import Hop, Instance
    from assigner.solver.segments import Column

    Terms = dict[pulp.LpVariable, float]

FORWARD, BACKWARD = "F", "B"
_SLACK = 1e-12


def add(*parts: tuple[float, Terms]) -> Terms:
    """The weighted sum of linear expressions."""
    total: Terms = defaultdict(float)
    for weight, terms in parts:
        for variable, value in terms.items():
            total[variable] += weight * value
    return total


class SegmentModel:
    """The ILP over some of an instance's columns.

    Args:
        instance: Prices.
        columns: The columns that may be used.
        unit: Seconds of one unit of the model's objective; about a thousandth of the step time scales it well.
    """

    def __init__(self, instance: Instance, columns: Sequence[Column], *, unit: float) -> None:
        self.instance, self.columns, self.unit = instance, list(columns), unit
        self.n, self.more = len(instance.problem.order), instance.micro_batches - 1
        self.problem = pulp.LpProblem("segments", pulp.LpMinimize)
        self.x = [self.problem.add_variable(f"x{j:06d}", 0, 1, pulp.LpInteger) for j in range(len(self.columns))]
        self._starting: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._ending: dict[tuple[int, int], list[int]] = defaultdict(list)
        for j, column in enumerate(self.columns):
            self._starting[column.first, column.group].append(j)
            self._ending[column.last + 1, column.group].append(j)
        self.y: dict[tuple[int, int, int], pulp.LpVariable] = {
            key: self.problem.add_variable(f"y_{key[0]}_{key[1]}_{key[2]}", 0, 1)
            for key in instance.hops
            if self._ending.get(key[:2]) and self._starting.get((key[0], key[2]))
        }
        self._at: dict[int, list[tuple[pulp.LpVariable, Hop]]] = defaultdict(list)
        for key, variable in self.y.items():
            self._at[key[0]].append((variable, instance.hops[key]))
        self._least = _LeastBusy(instance)
        self._rows = 0
        self._flow()
        self.objective = self._objective()
        self.problem.setObjective(pulp.LpAffineExpression(self.objective))

    def _add(self, terms: Terms, sense: int, bound: float) -> None:
        terms = {variable: value for variable, value in terms.items() if value}
        if terms:
            expression = pulp.LpAffineExpression(terms)
            self._rows += 1
            self.problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{self._rows:06d}", bound))
        elif (sense == pulp.LpConstraintEQ and bound) or (sense == pulp.LpConstraintGE and bound > 0):
            self._rows += 1
            never = self.problem.add_variable(f"never{self._rows}", 0, 0)
            self.problem.addConstraint(
                pulp.LpConstraint(pulp.LpAffineExpression({never: 1.0}), sense, f"r{self._rows:06d}", bound)
            )

    def _above(self, terms: Terms, low: Terms, *, slack: float = 0.0) -> None:
        """Terms >= low - slack."""
        self._add(add((1.0, terms), (-1.0, low)), pulp.LpConstraintGE, -slack)

    def _flow(self) -> None:
        groups = range(len(self.instance.groups))
        self._add({self.x[j]: 1.0 for j in self._first_columns(0)}, pulp.LpConstraintEQ, 1.0)
        leaving: dict[tuple[int, int], Terms] = defaultdict(dict)
        entering: dict[tuple[int, int], Terms] = defaultdict(dict)
        for (i, left, right), variable in self.y.items():
            leaving[i, left][variable] = entering[i, right][variable] = -1.0
        for i in range(1, self.n):
            for k in groups:
                self._add(
                    {**leaving[i, k], **{self.x[j]: 1.0 for j in self._ending.get((i, k), ())}},
                    pulp.LpConstraintEQ,
                    0.0,
                )
                self._add(
                    {**entering[i, k], **{self.x[j]: 1.0 for j in self._starting.get((i, k), ())}},
                    pulp.LpConstraintEQ, 0.0,
                )  # fmt: skip
        for k in groups:
            members = {self.x[j]: 1.0 for j, column in enumerate(self.columns) if column.group == k}
            self._add(members, pulp.LpConstraintLE, float(len(self.instance.groups[k])))
        most = self.instance.problem.most_workers
        if most < min(self.n, sum(map(len, self.instance.groups))):
            self._add(dict.fromkeys(self.x, 1.0), pulp.LpConstraintLE, float(most))

    def _seconds(self, column: Column, way: str) -> float:
        """A stage's own time, in the model's unit; 0 off the spine."""
        return self.instance.spine_s(column)[0 if way == FORWARD else 1] / self.unit

    def _boundary(self, i: int, price: Callable[[Hop], float]) -> Terms:
        return {variable: price(hop) / self.unit for variable, hop in self._at[i]}

    def _covering(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.n)]
        for j, column in enumerate(self.columns):
            for i in range(column.first, column.last + 1):
                found[i].append(j)
        return found

    def _objective(self) -> Terms:
        spine = self.instance.problem.spine
        covering = self._covering()
        sums: Terms = {
            self.x[j]: self._seconds(column, FORWARD) + self._seconds(column, BACKWARD)
            for j, column in enumerate(self.columns)
        }
        start = spine.backward.index(True)
        for j in covering[start]:
            column = self.columns[j]
            sums[self.x[j]] += (column.update_s + self._least.right(column, BACKWARD)) / self.unit
        for i in range(1, self.n):
            sums.update(self._boundary(i, lambda hop: hop.forward_s + hop.backward_s))
        slow_f = self.problem.add_variable("mF", 0)
        slow_b = self.problem.add_variable("mB", 0)
        excess_f = _Excess(self, FORWARD)
        excess_b = _Excess(self, BACKWARD)
        if self.more:
            self._slowest(slow_f, FORWARD, spine.forward, covering, excess_f)
            self._slowest(slow_b, BACKWARD, spine.backward, covering, excess_b)
        turn: Terms = {self.x[j]: self._least.left(self.columns[j], FORWARD) / self.unit for j in covering[spine.end]}
        objective = add(
            (1.0, sums), (float(self.more), {slow_f: 1.0, slow_b: 1.0}), (1.0, turn),
            (1.0, excess_f.inwards(spine.end)), (1.0, excess_b.outwards(start)),
        )  # fmt: skip
        if self.instance.problem.exact:
            return add((1.0, objective), (1.0, self._tail(slow_b, excess_b)))
        return self._loads(objective, covering)

    def _slowest(
        self, slowest: pulp.LpVariable, way: str, on: Sequence[bool], covering: list[list[int]], excess: _Excess
    ) -> None:
        loads: dict[int, Terms] = defaultdict(dict)
        for j, column in enumerate(self.columns):
            loads[column.group][self.x[j]] = self._server(column, way)
        for group, terms in loads.items():
            self._above({slowest: float(len(self.instance.groups[group]))}, terms)
        for i in range(self.n):
            if on[i]:
                terms = {self.x[j]: self._server(self.columns[j], way) for j in covering[i]}
                self._above({slowest: 1.0}, add((1.0, terms), (1.0, excess.inwards(i)), (1.0, excess.outwards(i))))
            if i:
                self._above(
                    {slowest: 1.0},
                    self._boundary(i, lambda hop: hop.forward_s if way == FORWARD else hop.backward_s),
                )

    def _server(self, column: Column, way: str) -> float:
        """What a stage is as a server: its time and the least its boundaries keep it busy."""
        return self._seconds(column, way) + (self._least.left(column, way) + self._least.right(column, way)) / self.unit

    def _loads(self, objective: Terms, covering: list[list[int]]) -> Terms:
        """The objective, raised where one worker's work alone takes longer."""
        m = self.more + 1
        load = {self.problem.add_variable("load", 0): 1.0}
        raised = add((1.0, objective), (1.0, load))
        for i in range(self.n):
            work: Terms = {}
            for j in covering[i]:
                column = self.columns[j]
                work[self.x[j]] = (m * (column.forward_s + column.backward_s) + column.update_s) / self.unit
            self._above(raised, work)
        return raised

    def _tail(self, slow_b: pulp.LpVariable, excess: _Excess) -> Terms:
        """The variable `tail` with its rows, or nothing where the first stage's update always ends last."""
        late = self._late_positions(excess)
        if not late:
            return {}
        tail: Terms = {self.problem.add_variable("tail", 0): 1.0}
        behind: Terms = {slow_b: float(self.more)}  # what T[0] has and T[p] has not, but for its own slowest
        first = {self.x[j]: self._update(self.columns[j]) for j in self._first_columns(0)}
        slower = slow_b
        for p in range(1, self.n):
            slowest = self.problem.add_variable(f"m{p:04d}", 0)
            self._above({slower: 1.0}, {slowest: 1.0})
            slower = slowest
            own = add((1.0, excess.chosen(p, right=True)), (1.0, excess.outwards(p)))
            free = excess.largest  # switches `own` off where no stage starts at p
            is_start = {self.x[j]: free for j in self._first_columns(p)}
            server = {self.x[j]: self._server(self.columns[j], BACKWARD) for j in self._first_columns(p)}
            self._above({slowest: 1.0}, add((1.0, server), (1.0, own), (1.0, is_start)), slack=free)
            if p + 1 < self.n:
                self._above({slowest: 1.0}, self._boundary(p + 1, lambda hop: hop.backward_s))
            before = {self.x[j]: self._seconds(self.columns[j], BACKWARD) for j in self._first_columns(p - 1)}
            behind = add((1.0, behind), (1.0, before), (1.0, self._boundary(p, lambda hop: hop.backward_s)))
            if p in late:
                update = {self.x[j]: self._update(self.columns[j]) for j in self._first_columns(p)}
                self._above(
                    add((1.0, tail), (1.0, behind), (1.0, first), (1.0, excess.outwards(0))),
                    add((float(self.more), {slowest: 1.0}), (1.0, update), (1.0, own), (1.0, is_start)),
                    slack=free,
                )
        return tail

    def _update(self, column: Column) -> float:
        busy = self._least.left(column, BACKWARD) + self._least.right(column, BACKWARD)
        return (column.update_s + busy) / self.unit

    def _first_columns(self, p: int) -> Iterable[int]:
        return (j for k in range(len(self.instance.groups)) for j in self._starting.get((p, k), ()))

    def _late_positions(self, excess: _Excess) -> set[int]:
        """Positions at which a stage's update could end later than the first stage's."""
        least = [0.0]
        for i in range(self.n):
            own = [price.backward_s / self.unit for prices in self.instance.prices if (price := prices[i])]
            least.append(least[-1] + min(own, default=0.0))
        return {
            p
            for p in range(1, self.n)
            for j in self._first_columns(p)
            if self._update(self.columns[j]) + 2 * excess.largest > least[p] + _SLACK
        }

    def cut(self, columns: Iterable[Column], value_s: float) -> None:
        """The pipelines that use all of these columns take at least `value_s` seconds; inf: they do not exist."""
        number = {column: j for j, column in enumerate(self.columns)}
        used = {self.x[number[column]]: 1.0 for column in columns}
        if value_s == float("inf"):
            self._add(used, pulp.LpConstraintLE, len(used) - 1.0)
            return
        value = value_s / self.unit
        self._add(add((1.0, self.objective), (-value, used)), pulp.LpConstraintGE, -value * (len(used) - 1))

    def chosen(self) -> tuple[Column, ...]:
        """The columns at 1 in the solution found, in order of position."""
        return tuple(sorted((c for c, x in zip(self.columns, self.x, strict=True) if x.varValue and x.varValue > 0.5),
                            key=lambda column: column.first))  # fmt: skip


def _side(hop: Hop, way: str, side: int) -> float:
    return (hop.forward_busy if way == FORWARD else hop.backward_busy)[side]


class _LeastBusy:
    """The least seconds that a boundary can keep a worker of a group busy, whoever is at its other side."""

    def __init__(self, instance: Instance) -> None:
        self._least: dict[tuple[str, int, int, int], float] = {}
        for (i, left, right), hop in instance.hops.items():
            for way in (FORWARD, BACKWARD):
                for side, group in ((0, left), (1, right)):
                    key, busy = (way, side, i, group), _side(hop, way, side)
                    self._least[key] = min(busy, self._least.get(key, busy))

    def of(self, way: str, side: int, i: int, group: int) -> float:
        return self._least.get((way, side, i, group), 0.0)

    def left(self, column: Column, way: str) -> float:
        """At the column's left boundary, where it is the right worker."""
        return self.of(way, 1, column.first, column.group)

    def right(self, column: Column, way: str) -> float:
        return self.of(way, 0, column.last + 1, column.group)


class _Excess:
    """What the boundaries chosen keep a stage's worker busy beyond the least, carried to every position it covers."""

    def __init__(self, model: SegmentModel, way: str) -> None:
        self._model, self._way, least = model, way, model._least
        self._over: dict[int, list[Terms]] = {}
        self.largest = 0.0
        for (i, left, right), variable in model.y.items():
            hop = model.instance.hops[i, left, right]
            for side, group in ((0, left), (1, right)):
                excess = (_side(hop, way, side) - least.of(way, side, i, group)) / model.unit
                if excess > 0:
                    self.largest = max(self.largest, excess)
                    self._over.setdefault(i, [{}, {}])[side][variable] = excess
        self._in: dict[int, pulp.LpVariable] = {}
        self._out: dict[int, pulp.LpVariable] = {}
        if self.largest:
            self._carry()

    def _carry(self) -> None:
        model, n = self._model, self._model.n
        self._in = {i: model.problem.add_variable(f"in{self._way}{i:04d}", 0) for i in range(1, n)}
        self._out = {i: model.problem.add_variable(f"out{self._way}{i:04d}", 0) for i in range(n - 1)}

        def start(i: int) -> Terms:
            return {variable: self.largest for variable, _ in model._at[i]}

        for i in range(1, n):
            model._above({self._in[i]: 1.0}, self.chosen(i, right=True))
            if i > 1:
                model._above(add((1.0, {self._in[i]: 1.0}), (1.0, start(i))), {self._in[i - 1]: 1.0})
        for i in range(n - 1):
            model._above({self._out[i]: 1.0}, self.chosen(i + 1, right=False))
            if i < n - 2:
                model._above(add((1.0, {self._out[i]: 1.0}), (1.0, start(i + 1))), {self._out[i + 1]: 1.0})

    def chosen(self, i: int, *, right: bool) -> Terms:
        """The excess at boundary i of its right or left worker."""
        return self._over.get(i, [{}, {}])[1 if right else 0]

    def inwards(self, i: int) -> Terms:
        """The excess, from its left boundary, of the stage that covers i."""
        return {self._in[i]: 1.0} if i in self._in else {}

    def outwards(self, i: int) -> Terms:
        """The excess, from its right boundary, of the stage that covers i."""
        return {self._out[i]: 1.0} if i in self._out else {}
