"""The ILP over pipelines, under GPipe or 1F1B: a path of columns through the positions, and boundaries between them.

The package's docstring has sets, variables and rows. Memory, and all hints but the number of workers, say which columns
and boundaries there are. With S the sum of all forwards, backwards and messages of one micro-batch, and u from the
first stage's last backward to the end of its update, or of one that waits for a gradient that it shares, the step is

    GPipe     S + u + what keeps the last stage busy at its turn + (M-1) (mF + mB), least so that
              slowest  for each position i: sum over j covering i of g[j] x[j] <= mF;  for each boundary: sum c y <= mF;
                       for each group: sum of g x on k <= count[k] mF;  the same with h, c', mB
              late     for each p whose update could end last, with m[p] the slowest server backward from p on:
                       u + (M-1) mB + backwards and their messages in front of p >= (M-1) m[p] + the same as u at p
    1F1B      T, least so that
              work     for each position i, of the stage j over it:
                       T >= u + all in front of j + sum over j of (M (f + b) + (M-1) busy) x[j]
              window   for each position i, with at most d micro-batches in flight:
                       T >= u + S + sum over j of max((M-1) b + (M-d) f, (M-1) f + (M-d) b) x[j]
              links    for each boundary:  T >= u + S + (M-1) max(c, c')

Exactly one column covers a position, so the maximum over the stages is a row for each position, and no row has to be
switched off: a disaggregation of the max, which makes the relaxation strong.

Busy shares: g[j] = f[j] + the least that the stage's two boundaries can keep its worker busy, h[j] the same backward.
What the boundary chosen costs `beyond` that least counts at the position beside it, and under GPipe it is carried
from there: with R the largest, b[i] >= sum beyond y[i] and b[i] >= b[i-1] - R (boundary at i), so b[i] is that of the
stage over i, whatever its length; backward from the right. Exact at whole x, and no rows where links are alike.

1F1B's is a lower bound (`OneFOneBStep` has the reasons), which leaves out that every d-th forward waits for a backward.
GPipe's leaves out turns before the last stage, and is one with shared parameters too. Of a graph, only what lies on the
spine is added up, and a row for each position has one worker's own work. What a pipeline takes, at the best of its
warm-up depths, the simulator says: a cut tells it to the model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import pulp

from assigner.solver.ilp.linear import LARGEST, LinearModel, add, capped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.solver.ilp.linear import Terms
    from assigner.solver.limits.clock import SolveClock
    from assigner.solver.problem.interval_prices import Hop, IntervalPrices
    from assigner.solver.problem.stage_options import StageOption

FORWARD, BACKWARD = WAYS = "F", "B"
RIGHT, LEFT = SIDES = 0, 1  # of a stage: where it is the left worker of a boundary, and where it is the right one


class PipelineModel(LinearModel):
    """The ILP over some of an instance's columns, as under 1F1B (`deep`) or under GPipe."""

    def __init__(
        self, table: IntervalPrices, columns: Sequence[StageOption], *, deep: bool, unit: float,
        clock: SolveClock | None = None,
    ) -> None:  # fmt: skip
        super().__init__("pipelines", unit=unit, clock=clock)
        self.table, self.columns = table, list(columns)
        self.n, self.more, self._deep = len(table.problem.order), table.micro_batches - 1, deep
        self.x = [
            self.problem.add_variable(f"x{j:06d}_{column.first}_{column.last}_{column.group}", 0, 1, pulp.LpInteger)
            for j, column in enumerate(self.columns)
        ]
        self._starting: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._ending: dict[tuple[int, int], list[int]] = defaultdict(list)
        for j, column in enumerate(self.columns):
            self._starting[column.first, column.group].append(j)
            self._ending[column.last + 1, column.group].append(j)
        self.at: dict[int, list[tuple[pulp.LpVariable, Hop, tuple[int, int]]]] = defaultdict(list)
        every = range(len(table.groups))
        for i, left, right in itertools.product(range(1, self.n), every, every):
            meets = self._ending.get((i, left)) and self._starting.get((i, right))
            hop = table.hop(i, left, right) if meets else None
            if hop is not None:
                self.at[i].append((self.problem.add_variable(f"y_{i}_{left}_{right}", 0, 1), hop, (left, right)))
        self._least: dict[tuple[str, int, int, int], float] = {}
        for i, way, side in itertools.product(range(self.n), WAYS, SIDES):
            for _, hop, groups in self.at[i]:
                at, busy = (way, side, i, groups[side]), _busy_s(hop, way, side)
                self._least[at] = min(busy, self._least.get(at, busy))
        self._flow()
        self.objective = capped(self._objective())
        self.problem.setObjective(pulp.LpAffineExpression(self.objective))

    def _flow(self) -> None:
        groups = range(len(self.table.groups))
        self.add_row({self.x[j]: 1.0 for j in self.first_columns(0)}, pulp.LpConstraintEQ, 1.0)
        leaving: dict[tuple[int, int], Terms] = defaultdict(dict)
        entering: dict[tuple[int, int], Terms] = defaultdict(dict)
        for i, ways in self.at.items():
            for variable, _, (left, right) in ways:
                leaving[i, left][variable] = entering[i, right][variable] = -1.0
        sides = (leaving, self._ending), (entering, self._starting)
        for i, k, (hops, stages) in itertools.product(range(1, self.n), groups, sides):
            used = {self.x[j]: 1.0 for j in stages.get((i, k), ())}
            self.add_row({**hops[i, k], **used}, pulp.LpConstraintEQ, 0.0)
        for k in groups:
            members = {self.x[j]: 1.0 for j, column in enumerate(self.columns) if column.group == k}
            self.add_row(members, pulp.LpConstraintLE, float(len(self.table.groups[k])))
        most = self.table.most_workers
        if most < min(self.n, sum(map(len, self.table.groups))):
            self.add_row(dict.fromkeys(self.x, 1.0), pulp.LpConstraintLE, float(most))

    def first_columns(self, p: int) -> Iterable[int]:
        """Numbers of the columns that start at a position."""
        return (j for k in range(len(self.table.groups)) for j in self._starting.get((p, k), ()))

    def _objective(self) -> Terms:
        """The step in the model's unit, with the variables and rows that it needs."""
        covering = self.covering()
        end: Terms = {self.problem.add_variable("update", 0): 1.0}
        own = self._each(range(len(self.columns)), lambda column: sum(self._seconds(column, way) for way in WAYS))
        step = (self._one_in_turn if self._deep else self._forwards_first)(own, end, covering)
        for held in covering if not self.table.problem.exact else ():
            self.above(step, self._each(held, self._alone))
        return step

    def _one_in_turn(self, own: Terms, end: Terms, covering: list[list[int]]) -> Terms:
        """1F1B's: rows work, window and links."""
        step: Terms = {self.problem.add_variable("T", 0): 1.0}
        self._ends(end, covering[self.table.problem.spine.start], {})
        ways = [self.boundary(i, lambda hop: hop.forward_s + hop.backward_s) for i in range(self.n)]
        whole = add((1.0, own), (1.0, end), *((1.0, way) for way in ways))
        ending: dict[int, Terms] = defaultdict(dict)
        for x, column in zip(self.x, self.columns, strict=True):
            ending[column.last + 1][x] = own[x]
        front, sides = end, [(way, side) for way in WAYS for side in SIDES if self.table.problem.exact]
        for i, held in enumerate(covering):
            front = add((1.0, front), (1.0, ending[i]), (1.0, ways[i]))
            busy = add(*((float(self.more), self._beyond(i, way, side)) for way, side in sides))
            self.above(step, add((1.0, front), (1.0, self._each(held, self._work)), (1.0, busy)))
            self.above(step, add((1.0, whole), (1.0, self._each(held, self._window))))
            if longer := self.boundary(i, lambda hop: max(hop.forward_s, hop.backward_s)):
                self.above(step, add((1.0, whole), (float(self.more), longer)))
        return step

    def _forwards_first(self, own: Terms, end: Terms, covering: list[list[int]]) -> Terms:
        """GPipe's: what adds up, with rows slowest, end and late."""
        spine = self.table.problem.spine
        slow_f, left = self._slowest(FORWARD, spine.forward, covering)
        slow_b, right = self._slowest(BACKWARD, spine.backward, covering)
        turn = self._each(covering[spine.end], lambda column: self._busy(column, FORWARD, (LEFT,)))
        self._ends(end, covering[spine.start], right[spine.start])
        if self.table.problem.exact:
            self._late(end, slow_b, right)
        return add(
            (1.0, own), (1.0, end), (1.0, turn), (1.0, left[spine.end]), (float(self.more), {slow_f: 1.0, slow_b: 1.0}),
            *((1.0, self._wire(i, way)) for i in range(self.n) for way in WAYS),
        )  # fmt: skip

    def _slowest(
        self, way: str, on: Sequence[bool], covering: list[list[int]]
    ) -> tuple[pulp.LpVariable, Sequence[Terms]]:
        """The slowest server one way, and what `_carried` says of it."""
        slowest, side = self.problem.add_variable(f"m{way}", 0), LEFT if way == FORWARD else RIGHT
        carried = self._carried(way, side)
        for k, group in enumerate(self.table.groups) if self.more else ():
            members = [j for j, column in enumerate(self.columns) if column.group == k]
            self.above({slowest: float(len(group))}, self._each(members, lambda column: self._server(column, way)))
        for i, held in enumerate(covering) if self.more else ():
            if on[i]:
                servers = self._each(held, lambda column: self._server(column, way))
                beyond = add((1.0, carried[i]), (1.0, self._beyond(i, way, 1 - side)))
                self.above({slowest: 1.0}, add((1.0, servers), (1.0, beyond)))
            if i:
                self.above({slowest: 1.0}, self._wire(i, way))
        return slowest, carried

    def _late(self, end: Terms, slow_b: pulp.LpVariable, right: Sequence[Terms]) -> None:
        """Rows late of a chain, for the positions at which a stage's update could end after the first stage's."""
        starts = [list(self.first_columns(p)) for p in range(self.n)]
        backward = self.table.figures("backward_s").min(axis=0).tolist()
        least = list(itertools.accumulate(backward, initial=0.0))
        busy = sum(self._most_beyond(BACKWARD, side) for side in SIDES)
        late = {
            p for p in range(1, self.n) for j in starts[p] if self._end(self.columns[j]) + busy > least[p] / self.unit
        }
        front, slower, more = add((1.0, end), (float(self.more), {slow_b: 1.0})), slow_b, float(self.more)
        for p in range(1, max(late, default=0) + 1):
            slowest = self.problem.add_variable(f"m{p:04d}", 0)
            beyond = add((1.0, self._beyond(p, BACKWARD, 1)), (1.0, right[p]))
            servers = self._each(starts[p], lambda column: self._server(column, BACKWARD))
            self.above({slower: 1.0}, {slowest: 1.0})
            self.above({slowest: 1.0}, add((1.0, servers), (1.0, beyond)))
            self.above({slowest: 1.0}, self._wire(p + 1, BACKWARD))
            before = self._each(starts[p - 1], lambda column: self._seconds(column, BACKWARD))
            front, slower = add((1.0, front), (1.0, before), (1.0, self._wire(p, BACKWARD))), slowest
            if p in late:
                self._ends(add((1.0, front), (-more, {slowest: 1.0})), starts[p], beyond)

    def _ends(self, high: Terms, held: Iterable[int], beyond: Terms) -> None:
        """High is no less than what the updates take of those columns that start, or lie, at one position."""
        if any(beyond.values()):
            self.above(high, add((1.0, self._each(held, self._update)), (1.0, beyond)))
        self.above(high, self._each(held, self._end))

    def _each(self, numbers: Iterable[int], price: Callable[[StageOption], float]) -> Terms:
        """What the columns with these numbers cost, in the model's unit."""
        return {self.x[j]: price(self.columns[j]) for j in numbers}

    def _seconds(self, column: StageOption, way: str) -> float:
        """A stage's own time, in the model's unit; 0 off the spine."""
        return self.table.spine_s(column)[0 if way == FORWARD else 1] / self.unit

    def _server(self, column: StageOption, way: str) -> float:
        """What a stage is as a server: its time and the least its boundaries keep it busy."""
        return self._seconds(column, way) + self._busy(column, way)

    def _busy(self, column: StageOption, way: str, sides: Iterable[int] = SIDES) -> float:
        """The least that its boundaries keep a stage's worker busy, whoever is at their other side."""
        at = column.last + 1, column.first
        return sum(self._least.get((way, side, at[side], column.group), 0.0) for side in sides) / self.unit

    def _update(self, column: StageOption) -> float:
        """From a stage's last backward to the end of its update: its messages come first."""
        return column.update_s / self.unit + self._busy(column, BACKWARD)

    def _end(self, column: StageOption) -> float:
        """The same, or to the end of an update that waits for its gradient, at least."""
        return max(self._update(column), column.tied_s / self.unit)

    def _work(self, column: StageOption) -> float:
        """All micro-batches of a stage, and the least that its messages keep it busy meanwhile."""
        if not self.table.problem.exact:  # stages may run side by side
            return (self.more + 1) * sum(self._seconds(column, way) for way in WAYS)
        return sum(self._seconds(column, way) + self.more * self._server(column, way) for way in WAYS)

    def _alone(self, column: StageOption) -> float:
        return ((self.more + 1) * (column.forward_s + column.backward_s) + column.behind_s) / self.unit

    def _window(self, column: StageOption) -> float:
        """What a warm-up depth costs beyond one micro-batch's trip: forwards that wait for the first, or last, trip."""
        forward, backward = (self._seconds(column, way) for way in WAYS)
        binds = self.table.problem.exact or (forward > 0 and backward > 0)
        later = max(0, self.more + 1 - column.bound_depth) if binds else 0
        return max(self.more * backward + later * forward, self.more * forward + later * backward)

    def _beyond(self, i: int, way: str, side: int) -> Terms:
        """What the boundary at one side of position i keeps the worker of i busy beyond the least."""
        at = (i + 1, i)[side]
        return {
            variable: min(LARGEST, (_busy_s(hop, way, side) - self._least[way, side, at, groups[side]]) / self.unit)
            for variable, hop, groups in self.at[at]
        }

    def _most_beyond(self, way: str, side: int) -> float:
        return max((value for i in range(self.n) for value in self._beyond(i, way, side).values()), default=0.0)

    def _carried(self, way: str, side: int) -> Sequence[Terms]:
        """The same for each position, of the boundary at that side of the stage over it, wherever it is."""
        largest, before = self._most_beyond(way, side), dict[pulp.LpVariable, float]()
        found: list[Terms] = [{} for _ in range(self.n)]
        for i in (range(self.n) if side == LEFT else reversed(range(self.n))) if largest else ():
            found[i] = {self.problem.add_variable(f"b{way}{i:04d}", 0): 1.0}
            beyond = self._beyond(i, way, side)
            self.above(found[i], beyond)
            self.above(add((1.0, found[i]), (largest, dict.fromkeys(beyond, 1.0))), before)
            before = found[i]
        return found

    def _wire(self, i: int, way: str) -> Terms:
        """The message over boundary i, one way."""
        return self.boundary(i, lambda hop: hop.forward_s if way == FORWARD else hop.backward_s)

    def boundary(self, i: int, price: Callable[[Hop], float]) -> Terms:
        """What boundary i costs, in the model's unit; nothing where there is none."""
        return {variable: price(hop) / self.unit for variable, hop, _ in self.at[i]}

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
        value = min(value_s / self.unit, LARGEST)  # or `add_row` weakens the row until it says nothing
        self.add_row(add((1.0, self.objective), (-value, used)), pulp.LpConstraintGE, -value * (len(used) - 1))

    def chosen(self) -> tuple[StageOption, ...]:
        """The columns at 1 in the solution found, in order of position."""
        return tuple(sorted((c for c, x in zip(self.columns, self.x, strict=True) if x.varValue and x.varValue > 0.5),
                            key=lambda column: column.first))  # fmt: skip


def _busy_s(hop: Hop, way: str, side: int) -> float:
    """Seconds for which a boundary keeps its left worker (side 0) or its right one (1) busy, one way."""
    return (hop.forward_busy if way == FORWARD else hop.backward_busy)[side]
