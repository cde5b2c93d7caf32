"""The dynamic program over downsets where links are servers of their own and messages keep their ends busy.

A stage's load now depends on who is beside it, so `best` knows the class c of its first stage and, where messages keep
workers busy, the class b of the stage in front:

    best[u, c, b][I] = min over J and the next class d of
                       max(load(J - I, c) + busy(I; b, c) + busy(J; c, d), link(J; c, d), best[u - e_c, d, c][J])

Every value that crosses a cut is taken for a message between the two stages beside it. That is exact for chains; where
values skip a stage it is a guess, and the lines found are evaluated.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from load.lattice import Lattice, OutOfTimeError, Rows, Step, Table, level_counts, without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from load.items import Items
    from load.lattice import Counts

    State = tuple[Counts, int, int]
    Floats = NDArray[np.float64]


class LinkedLattice(Lattice):
    """The downsets of a problem under "links".

    Args:
        items: The problem's items.
        downsets: As of `Lattice`.
    """

    _least_busy = False  # it knows the neighbours, and charges for them

    def __init__(self, items: Items, downsets: Sequence[int]) -> None:
        super().__init__(items, downsets)
        self._none = len(self._counts)  # stands for no class: in front of the line, or behind it
        self._busy = items.problem.transfer.busy
        shape = (self._none + 1, self._none + 1, len(downsets))
        self._link, self._front_busy, self._end_busy = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._price_cuts()

    def _price_cuts(self) -> None:
        """By classes (left, right) and downset: what its cut costs the link, the left worker and the right one."""
        problem, held = self.items.problem, self._costs.held
        item = {node: number for number, group in enumerate(self.items.members) for node in group}
        transfer, classes = problem.transfer, range(self._none)
        there, back = np.zeros_like(self._link), np.zeros_like(self._link)
        for output in problem.outputs:
            inside = held[:, item[output.source]]
            beyond = [~held[:, item[target]] for target in output.targets]
            crosses = inside & np.any(beyond, axis=0)
            turns = [outside for outside, g in zip(beyond, output.gradients, strict=True) if g]
            returns = inside & np.any(turns, axis=0) if turns else np.zeros_like(inside)
            for b in classes:
                for c in classes:
                    there[b, c] += np.where(crosses, output.seconds[b][c], 0.0)
                    back[b, c] += np.where(returns, output.seconds[c][b], 0.0)
        self._link = np.maximum(there, back)
        for b in classes:
            for c in classes:
                sender = transfer.sender_busy or ((0.0,) * self._none,) * self._none
                receiver = transfer.receiver_busy or ((0.0,) * self._none,) * self._none
                with np.errstate(invalid="ignore"):  # no link, no share: inf * 0
                    left = sender[b][c] * there[b, c] + receiver[c][b] * back[b, c]
                    right = receiver[b][c] * there[b, c] + sender[c][b] * back[b, c]
                self._end_busy[b, c], self._front_busy[b, c] = np.nan_to_num(left), np.nan_to_num(right)

    def _pass(self, limit: float, deadline: float) -> tuple[float, list[Step] | None]:
        limit *= 1 - 1e-9
        start = self._empty()
        start.value[-1] = 0.0
        none = (0,) * self._none
        fronts = range(self._none) if self._busy else (self._none,)
        tables: dict[State, Table] = {(none, self._none, b): start for b in range(self._none + 1)}
        for position in range(1, sum(self._counts) + 1):
            counts = level_counts(self._counts, position)
            level: dict[State, Table] = {
                (u, c, b): self._empty() for u in counts for c in range(self._none) if u[c]
                for b in dict.fromkeys((*fronts, self._none))
            }  # fmt: skip
            lasts = np.zeros(len(self.downsets), dtype=bool)
            for (u, _, _), table in tables.items():
                if sum(u) == position - 1:
                    lasts |= table.value < limit
            for pairs in self._pairs(lasts, counts, position=position, limit=limit, deadline=deadline):
                rows = Rows(pairs)
                for (u, c, b), table in level.items():
                    if time.monotonic() > deadline:
                        raise OutOfTimeError
                    rest = without(u, c)
                    load = pairs.loads[c] + self._front_busy[b, c][pairs.first]
                    for d in range(self._none + 1):
                        onward = tables.get((rest, d, c if self._busy else self._none))
                        if onward is not None:
                            values = np.maximum(load + self._end_busy[c, d][pairs.last], onward.value[pairs.last])
                            values = np.maximum(values, self._link[c, d][pairs.last])
                            rows.improve(table, values, d, limit)
            tables |= level
        value, state = min((tables[state].value[0], state) for state in tables if state[2] == self._none)
        return (value, self._trace(tables, state)) if value < limit else (math.inf, None)

    def _trace(self, tables: dict[State, Table], state: State) -> list[Step]:
        steps, at = [], 0
        u, c, b = state
        while sum(u):
            table = tables[u, c, b]
            step = Step(at, int(table.onward[at]), c, sum(u))
            steps.append(step)
            onward = int(table.choice[at])
            at, u, c, b = step.last, without(u, c), onward, c if self._busy else self._none
        return steps

    def _line_load(self, steps: Sequence[Step]) -> float:
        largest, before = 0.0, self._none
        for step, after in zip(steps, [*(step.choice for step in steps[1:]), self._none], strict=True):
            load = self._settled[step][0]
            load += self._front_busy[before, step.choice][step.first] + self._end_busy[step.choice, after][step.last]
            largest = max(largest, load, self._link[step.choice, after][step.last])
            before = step.choice
        return float(largest)
