"""The exact dynamic program over downsets, from the end of the line to its beginning.

    best[u][I] = least largest load with which all items outside downset I run on u = (u_1, .., u_C) devices by class
               = min over classes c with u_c > 0 and downsets J beyond I of max(load(J - I, c), best[u - e_c][J])

The stage that is added is the u_1 + .. + u_C -th from the end, which is what its memory depends on. (Where r devices
may run a stage in turn, the minimum is over (c, r) too, and best[u - r e_c] is what remains.) Downsets whose
rest cannot be run by u devices below the limit, or whose inside not by the remaining ones, take no part: with weights
w_c >= 0, items of work t_c must satisfy sum of min_c w_c t_c <= limit * sum of w_c u_c.

Loads that are only known from below (`Pairs.exact`) are settled when the best line needs them, then the line is
searched anew, until the best one is exact.

Source: Tarnawski et al., NeurIPS 2020 and 2021 (Piper), who enumerate the same lattice.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from load.downsets import members
from load.pairs import PairCosts, Pairs, sums
from load.problem import Stage
from load.remat import choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from load.items import Items

_STRICTLY = 1 - 1e-9
"""What is looked for must be better by this, or rounding would prove nothing."""

_KEPT = 20_000_000
"""So many stages are remembered to be settled; of more only a bound is found."""

Counts = tuple[int, ...]


class OutOfTimeError(Exception):
    """The deadline passed before the lattice was searched."""


@dataclass(frozen=True)
class LatticeAnswer:
    """What the search over given downsets found.

    Args:
        stages: The best line below the limit, in order; None: there is none.
        value: Its largest load.
        bound: No line along these downsets has a smaller one.
    """

    stages: tuple[Stage, ...] | None
    value: float
    bound: float


@dataclass
class Table:
    """`best[u]` with the way on: by downset the next one, and what was chosen (the class of the stage between)."""

    value: NDArray[np.float64]
    onward: NDArray[np.intp]
    choice: NDArray[np.intp]


@dataclass(frozen=True)
class Step:
    """A stage of a line: its downsets' numbers, the choice of its class and replicas, and where it stands."""

    first: int
    last: int
    choice: int
    position: int


class Lattice:
    """The downsets of one problem, priced.

    Args:
        items: The problem's items.
        downsets: Bit masks, the empty one first and the full one last, smaller ones before larger ones.
    """

    def __init__(self, items: Items, downsets: Sequence[int]) -> None:
        self.items, self.downsets = items, downsets
        self._costs = PairCosts(items, members(downsets, items.count))
        self._counts = [device.count for device in items.problem.devices]
        self._weights = _weights(self._costs.seconds)
        work = np.where(np.isinf(self._costs.seconds), np.inf, self._weights * self._costs.seconds).min(axis=1)
        self._work = sums(self._costs.held, work)
        self._settled: dict[Step, tuple[float, tuple[int, ...]]] = {}
        self._kept: dict[int, list[Pairs]] = {}

    def least_load(self) -> float:
        """A bound from work alone: all of it over all devices by speed, and every item where it is fastest."""
        room = sum(weight * number for weight, number in zip(self._weights, self._counts, strict=True))
        least = self._costs.seconds.min(axis=1)
        largest = least.max(initial=0.0) / self.items.problem.replicas
        return float(max(self._work[-1] / room if room else math.inf, largest))

    def search(self, *, limit: float, deadline: float, gap: float = 0.0) -> LatticeAnswer:
        """The best line with a largest load below `limit`, to a relative gap.

        Raises:
            OutOfTimeError: `deadline` (monotonic seconds) passed before the first pass ended.
        """
        best: tuple[Stage, ...] | None = None
        self._kept.clear()
        bound, value = 0.0, limit
        while True:
            try:
                found, steps = self._pass(value, deadline)
            except OutOfTimeError:
                if bound:
                    return LatticeAnswer(best, value, bound)
                raise
            if steps is None:
                return LatticeAnswer(best, value, value)
            bound = max(bound, found)
            settled = [self._settle(step) for step in steps]
            exact = float(max(self._settled[step][0] for step in steps))
            if exact < value:
                value, best = exact, self._stages(steps)
            close = math.isfinite(value) and value - bound <= gap * value
            if close or not any(settled):
                return LatticeAnswer(best, value, bound if any(settled) else min(value, found))

    def _pass(self, limit: float, deadline: float) -> tuple[float, list[Step] | None]:
        """The best line by the loads that are known, below `limit`."""
        limit *= _STRICTLY
        full = len(self.downsets) - 1
        start = self._empty()
        start.value[full] = 0.0
        tables = {(0,) * len(self._counts): start}
        for position in range(1, sum(self._counts) + 1):
            level = {u: self._empty() for u in level_counts(self._counts, position)}
            self._extend(tables, level, position, limit, deadline)
            tables |= level
        value, u = min((table.value[0], u) for u, table in tables.items())
        if not value < limit:
            return math.inf, None
        return value, self._line(tables, u)

    def _line(self, tables: dict[Counts, Table], u: Counts) -> list[Step]:
        steps, at = [], 0
        while sum(u):
            table = tables[u]
            step = Step(at, int(table.onward[at]), int(table.choice[at]), sum(u))
            steps.append(step)
            at, u = step.last, without(u, *self._costs.choices[step.choice])
        return steps

    def _empty(self) -> Table:
        count = len(self.downsets)
        return Table(np.full(count, np.inf), np.full(count, -1), np.full(count, -1))

    def _extend(
        self, tables: dict[Counts, Table], level: dict[Counts, Table], position: int, limit: float, deadline: float
    ) -> None:
        lasts = np.zeros(len(self.downsets), dtype=bool)
        for u, table in tables.items():
            if position - self.items.problem.replicas <= sum(u) < position:
                lasts |= table.value < limit
        for pairs in self._pairs(lasts, level, position=position, limit=limit, deadline=deadline):
            rows = Rows(pairs)
            for u, table in level.items():
                if time.monotonic() > deadline:
                    raise OutOfTimeError
                for n, (c, r) in enumerate(self._costs.choices):
                    if u[c] >= r:
                        onward = tables[without(u, c, r)].value
                        rows.improve(table, np.maximum(pairs.loads[n], onward[pairs.last]), n, limit)

    def _pairs(
        self, lasts: NDArray[np.bool_], level: Iterable[Counts], *, position: int, limit: float, deadline: float
    ) -> Iterator[Pairs]:
        """The stages at `position` from the end that end with one of `lasts`."""
        if position in self._kept:
            yield from self._kept[position]
            return
        firsts = np.zeros(len(self.downsets), dtype=bool)
        for u in level:
            firsts |= self._window(u, limit)
        kept: list[Pairs] = []
        for pairs in self._costs.pairs(np.flatnonzero(firsts), np.flatnonzero(lasts), limit=limit, position=position):
            if time.monotonic() > deadline:
                raise OutOfTimeError
            if self._costs.memory_matters:
                kept.append(pairs)
            yield pairs
        kept_already = sum(len(pairs.first) for level in self._kept.values() for pairs in level)
        if not all(pairs.exact.all() for pairs in kept) and kept_already < _KEPT:
            self._kept[position] = kept

    def _window(self, u: Counts, limit: float) -> NDArray[np.bool_]:
        """Which downsets can be the front of u devices at the end."""
        if math.isinf(limit):
            return np.ones(len(self.downsets), dtype=bool)
        room = limit * sum(weight * number for weight, number in zip(self._weights, u, strict=True))
        rest = limit * sum(w * (n - m) for w, n, m in zip(self._weights, self._counts, u, strict=True))
        slack = 1e-9 * self._work[-1]
        fits: NDArray[np.bool_] = (self._work[-1] - self._work <= room + slack) & (self._work <= rest + slack)
        return fits

    def _settle(self, step: Step) -> bool:
        """Make a stage's load exact; True if it was known only from below."""
        if step in self._settled:
            return False
        device, _ = self._costs.choices[step.choice]
        stage = self.items.stage(device, self._items(step))
        found = choose(self.items.problem, stage.nodes, device=device, position=step.position)
        load = least = math.inf
        again: tuple[int, ...] = ()
        if found is not None:
            again = found.again
            load = self._costs.price(step.first, step.last, choice=step.choice, added=found.added)
            least = self._costs.price(step.first, step.last, choice=step.choice, added=found.bound)
        self._settled[step] = (load, again)
        changed = False
        for pairs in self._kept.get(step.position, ()):
            at = np.flatnonzero((pairs.first == step.first) & (pairs.last == step.last))
            for n in at:
                changed |= not pairs.exact[step.choice, n]
                pairs.loads[step.choice, n] = max(pairs.loads[step.choice, n], least)
                pairs.exact[step.choice, n] = True
        return changed

    def _items(self, step: Step) -> list[int]:
        mask = self.downsets[step.last] & ~self.downsets[step.first]
        return [item for item in range(self.items.count) if mask >> item & 1]

    def _stages(self, steps: Sequence[Step]) -> tuple[Stage, ...]:
        stages = []
        for step in steps:
            device, replicas = self._costs.choices[step.choice]
            stage = self.items.stage(device, self._items(step), self._settled[step][1])
            stages.append(replace(stage, replicas=replicas))
        return tuple(stages)


class Rows:
    """Stages by their downset in front: a minimum for each."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._starts = np.flatnonzero(np.diff(pairs.first, prepend=-1))
        self._rows = pairs.first[self._starts]
        self._row_of = np.repeat(np.arange(len(self._starts)), np.diff(self._starts, append=len(pairs.first)))

    def improve(self, table: Table, values: NDArray[np.float64], choice: int, limit: float) -> None:
        """Put into `table`, with `choice`, the least value of each row where it is better and below `limit`."""
        least = np.minimum.reduceat(values, self._starts)
        better = (least < table.value[self._rows]) & (least < limit)
        if not better.any():
            return
        hits = np.flatnonzero(values == least[self._row_of])
        _, at = np.unique(self._row_of[hits], return_index=True)  # the first hit of each row
        rows = self._rows[better]
        table.value[rows] = least[better]
        table.onward[rows] = self._pairs.last[hits[at]][better]
        table.choice[rows] = choice


def without(u: Counts, c: int, r: int = 1) -> Counts:
    """So many devices of class c less."""
    return (*u[:c], u[c] - r, *u[c + 1 :])


def level_counts(counts: Sequence[int], total: int) -> list[Counts]:
    """Ways to use `total` devices."""
    return [u for u in itertools.product(*(range(count + 1) for count in counts)) if sum(u) == total]


def _weights(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """A weight per class: its speed on what every class can run, the fastest having 1."""
    shared = seconds[np.isfinite(seconds).all(axis=1)].sum(axis=0)
    if not len(shared) or (shared <= 0).any():
        return np.ones(seconds.shape[1])
    weights: NDArray[np.float64] = shared.min() / shared
    return weights
