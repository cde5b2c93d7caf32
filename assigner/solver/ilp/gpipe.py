"""GPipe's step time as the objective of an ILP over pipelines; sets, x, y, flow and count are the package's.

Variables mF, mB: slowest server forward, backward; m[p]: slowest server backward among stages that start at p or later
          tail: by how much an update ends later than that of the first stage; o.F[i], ...: busy shares, see below

    minimise  sum (f + b) x + sum (c + c') y + (M-1) (mF + mB) + turn + update of the first stage + tail
    slowest   for each position i: sum over j covering i of g[j] x[j] <= mF   (exactly one of them is 1: this is what
              makes the relaxation strong);  for each boundary: sum c y[i] <= mF;  the same with h, c', mB
    loads     for each group: sum of g x on k <= count[k] mF;  the same with h, mB
    tail      for each p whose update could be the last to end:
              tail >= (T[p] + u x starting at p) - (T[0] + u x starting at 0),  T[p] = sums from p on + (M-1) m[p];
              of a stage that shares a gradient with another one, with what waits for that in the place of u, too

Busy shares: g[j] = f[j] + the least that the stage's two boundaries can keep its worker busy. What the boundary
chosen costs beyond that least is carried inwards: with `excess` of boundary i, and R the largest excess,
in[i] >= sum excess y[i] and in[i] >= in[i-1] - R (boundary at i), so in[i] is the excess of the stage that covers i,
whatever its length. `out` does the same from the right. Exact at whole x, and no rows at all where links are alike.

Turns before the last stage are left out: the optimum is a lower bound, and the search adds a cut for
the rare pipeline for which they matter. With shared parameters it is one, too. For graphs, only what lies on the spine
is added up, so the optimum is a lower bound; a row for each position adds M (f + b) and what is behind that of one
worker, and one says that the first stage's update waits for a gradient that it shares.

The strong rows are a disaggregation of the max.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.solver.ilp.linear import LARGEST, add
from assigner.solver.ilp.pipelines import BACKWARD, FORWARD, PipelineModel, busy_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pulp

    from assigner.solver.ilp.linear import Terms
    from assigner.solver.problem.stage_options import StageOption


_SLACK = 1e-12


class GPipeModel(PipelineModel):
    """GPipe's step time; arguments as of `PipelineModel`."""

    def _seconds(self, column: StageOption, way: str) -> float:
        """A stage's own time, in the model's unit; 0 off the spine."""
        return self.table.spine_s(column)[0 if way == FORWARD else 1] / self.unit

    def _objective(self) -> Terms:
        spine = self.table.problem.spine
        covering = self.covering()
        sums: Terms = {
            self.x[j]: self._seconds(column, FORWARD) + self._seconds(column, BACKWARD)
            for j, column in enumerate(self.columns)
        }
        start = spine.backward.index(True)
        for j in covering[start]:
            column = self.columns[j]
            sums[self.x[j]] += (column.update_s + self.least.right(column, BACKWARD)) / self.unit
        for i in range(1, self.n):
            sums.update(self.boundary(i, lambda hop: hop.forward_s + hop.backward_s))
        slow_f = self.problem.add_variable("mF", 0)
        slow_b = self.problem.add_variable("mB", 0)
        excess_f = _Excess(self, FORWARD)
        excess_b = _Excess(self, BACKWARD)
        if self.more:
            self._slowest(slow_f, FORWARD, spine.forward, covering, excess_f)
            self._slowest(slow_b, BACKWARD, spine.backward, covering, excess_b)
        turn: Terms = {self.x[j]: self.least.left(self.columns[j], FORWARD) / self.unit for j in covering[spine.end]}
        objective = add(
            (1.0, sums), (float(self.more), {slow_f: 1.0, slow_b: 1.0}), (1.0, turn),
            (1.0, excess_f.inwards(spine.end)), (1.0, excess_b.outwards(start)),
        )  # fmt: skip
        if self.table.problem.exact:
            return add((1.0, objective), (1.0, self._tail(slow_b, excess_b)))
        return self._loads(objective, covering, excess_b)

    def _slowest(
        self, slowest: pulp.LpVariable, way: str, on: Sequence[bool], covering: list[list[int]], excess: _Excess
    ) -> None:
        loads: dict[int, Terms] = defaultdict(dict)
        for j, column in enumerate(self.columns):
            loads[column.group][self.x[j]] = self._server(column, way)
        for group, terms in loads.items():
            self.above({slowest: float(len(self.table.groups[group]))}, terms)
        for i in range(self.n):
            if on[i]:
                terms = {self.x[j]: self._server(self.columns[j], way) for j in covering[i]}
                self.above({slowest: 1.0}, add((1.0, terms), (1.0, excess.inwards(i)), (1.0, excess.outwards(i))))
            if i:
                self.above(
                    {slowest: 1.0},
                    self.boundary(i, lambda hop: hop.forward_s if way == FORWARD else hop.backward_s),
                )

    def _server(self, column: StageOption, way: str) -> float:
        """What a stage is as a server: its time and the least its boundaries keep it busy."""
        return self._seconds(column, way) + (self.least.left(column, way) + self.least.right(column, way)) / self.unit

    def _loads(self, objective: Terms, covering: list[list[int]], excess: _Excess) -> Terms:
        """The objective, raised where one worker's work alone takes longer, or the first backward's update waits."""
        m, start = self.more + 1, self.table.problem.spine.backward.index(True)
        load = {self.problem.add_variable("load", 0): 1.0}
        raised = add((1.0, objective), (1.0, load))
        self._wait(load, covering[start], excess.outwards(start))
        for i in range(self.n):
            work: Terms = {}
            for j in covering[i]:
                column = self.columns[j]
                work[self.x[j]] = (m * (column.forward_s + column.backward_s) + column.behind_s) / self.unit
            self.above(raised, work)
        return raised

    def _tail(self, slow_b: pulp.LpVariable, excess: _Excess) -> Terms:
        """The variable `tail` with its rows, or nothing where the first stage's own update always ends last."""
        late = self._late_positions(excess)
        if not late and not self._tied(self.first_columns(0)):
            return {}
        tail: Terms = {self.problem.add_variable("tail", 0): 1.0}
        self._wait(tail, list(self.first_columns(0)), excess.outwards(0))
        if not late:
            return tail
        behind: Terms = {slow_b: float(self.more)}  # what T[0] has and T[p] has not, but for its own slowest
        first = {self.x[j]: self._update(self.columns[j]) for j in self.first_columns(0)}
        slower = slow_b
        for p in range(1, self.n):
            slowest = self.problem.add_variable(f"m{p:04d}", 0)
            self.above({slower: 1.0}, {slowest: 1.0})
            slower = slowest
            own = add((1.0, excess.chosen(p, right=True)), (1.0, excess.outwards(p)))
            free = excess.largest  # switches `own` off where no stage starts at p
            is_start = {self.x[j]: free for j in self.first_columns(p)}
            server = {self.x[j]: self._server(self.columns[j], BACKWARD) for j in self.first_columns(p)}
            self.above({slowest: 1.0}, add((1.0, server), (1.0, own), (1.0, is_start)), slack=free)
            if p + 1 < self.n:
                self.above({slowest: 1.0}, self.boundary(p + 1, lambda hop: hop.backward_s))
            before = {self.x[j]: self._seconds(self.columns[j], BACKWARD) for j in self.first_columns(p - 1)}
            behind = add((1.0, behind), (1.0, before), (1.0, self.boundary(p, lambda hop: hop.backward_s)))
            if p in late:
                end = add((1.0, tail), (1.0, behind), (1.0, first), (1.0, excess.outwards(0)))
                started = add((float(self.more), {slowest: 1.0}), (1.0, is_start))
                update = {self.x[j]: self._update(self.columns[j]) for j in self.first_columns(p)}
                self.above(end, add((1.0, started), (1.0, update), (1.0, own)), slack=free)
                if tied := self._tied(self.first_columns(p)):
                    self.above(end, add((1.0, started), (1.0, tied)), slack=free)
        return tail

    def _tied(self, columns: Iterable[int]) -> Terms:
        """How long updates wait for the gradients of these stages, where that is longer than their own least."""
        waits = {j: self.columns[j].tied_s / self.unit for j in columns}
        return {self.x[j]: tied for j, tied in waits.items() if tied > self._update(self.columns[j])}

    def _wait(self, later: Terms, columns: Sequence[int], busy: Terms) -> None:
        """The first stage's update, and what is `later`, ends no earlier than one that waits for its gradient."""
        if tied := self._tied(columns):
            own = {self.x[j]: self._update(self.columns[j]) for j in columns}
            self.above(add((1.0, later), (1.0, own), (1.0, busy)), tied)

    def _update(self, column: StageOption) -> float:
        busy = self.least.left(column, BACKWARD) + self.least.right(column, BACKWARD)
        return (column.update_s + busy) / self.unit

    def _late_positions(self, excess: _Excess) -> set[int]:
        """Positions at which a stage's update could end later than the first stage's."""
        least = [0.0]
        for i in range(self.n):
            own = [price.backward_s / self.unit for prices in self.table.rows if (price := prices[i])]
            least.append(least[-1] + min(own, default=0.0))
        return {
            p
            for p in range(1, self.n)
            for j in self.first_columns(p)
            if max(self._update(self.columns[j]) + 2 * excess.largest, self.columns[j].tied_s / self.unit)
            > least[p] + _SLACK
        }


class _Excess:
    """What the boundaries chosen keep a stage's worker busy beyond the least, carried to every position it covers."""

    def __init__(self, model: GPipeModel, way: str) -> None:
        self._model, self._way, least = model, way, model.least
        self._over: dict[int, list[Terms]] = {}
        self.largest = 0.0
        for (i, left, right), variable in model.y.items():
            hop = model.table.hops[i, left, right]
            for side, group in ((0, left), (1, right)):
                excess = min(LARGEST, (busy_s(hop, way, side) - least.of(way, side, i, group)) / model.unit)
                if excess > 0:
                    self.largest = max(self.largest, excess)
                    self._over.setdefault(i, [{}, {}])[side][variable] = excess
        self._in: dict[int, pulp.LpVariable] = {}
        self._out: dict[int, pulp.LpVariable] = {}
        if self.largest:
            self._carry()

    def _carry(self) -> None:
        model, n = self._model, self._model.n
        self._in = {i: model.problem.add_variable(f"into{self._way}{i:04d}", 0) for i in range(1, n)}
        self._out = {i: model.problem.add_variable(f"out{self._way}{i:04d}", 0) for i in range(n - 1)}

        def start(i: int) -> Terms:
            return {variable: self.largest for variable, _ in model.at[i]}

        for i in range(1, n):
            model.above({self._in[i]: 1.0}, self.chosen(i, right=True))
            if i > 1:
                model.above(add((1.0, {self._in[i]: 1.0}), (1.0, start(i))), {self._in[i - 1]: 1.0})
        for i in range(n - 1):
            model.above({self._out[i]: 1.0}, self.chosen(i + 1, right=False))
            if i < n - 2:
                model.above(add((1.0, {self._out[i]: 1.0}), (1.0, start(i + 1))), {self._out[i + 1]: 1.0})

    def chosen(self, i: int, *, right: bool) -> Terms:
        """The excess at boundary i of its right or left worker."""
        return self._over.get(i, [{}, {}])[1 if right else 0]

    def inwards(self, i: int) -> Terms:
        """The excess, from its left boundary, of the stage that covers i."""
        return {self._in[i]: 1.0} if i in self._in else {}

    def outwards(self, i: int) -> Terms:
        """The excess, from its right boundary, of the stage that covers i."""
        return {self._out[i]: 1.0} if i in self._out else {}
