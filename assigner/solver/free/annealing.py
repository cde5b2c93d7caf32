"""Local search over placements of any shape: simulated annealing.

A placement is written as a topological order of the partitions, the worker of each, and the places in that order where
a stage ends though its worker goes on. Neighbours put some partitions that follow each other on another worker, move
one partition within the order, exchange two workers, or end a stage elsewhere. With one stage a worker the order and
the ends follow from the workers.

Source: S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, Optimization by simulated annealing, Science 220, 1983.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from assigner.solver.limits import tuning
from assigner.solver.methods.local_search import local_search
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.solver.free.pricing import Arrangement, Pricing, Stages


@dataclass(frozen=True)
class _Point:
    """Where the search stands."""

    order: tuple[int, ...]
    worker: tuple[int, ...]
    ends: tuple[bool, ...]

    @classmethod
    def of(cls, stages: Stages) -> _Point:
        order, worker, ends = [], [], []
        for w, mask in stages:
            for n, i in enumerate(bits(mask)):
                order.append(i)
                worker.append(w)
                ends.append(n == 0)
        return cls(tuple(order), tuple(worker), tuple(ends))

    def stages(self) -> Stages:
        found: list[tuple[int, int]] = []
        for i, w, end in zip(self.order, self.worker, self.ends, strict=True):
            if found and not end and found[-1][0] == w:
                found[-1] = (w, found[-1][1] | 1 << i)
            else:
                found.append((w, 1 << i))
        return tuple(found)


class Annealing:
    """One local search.

    Args:
        actions: So many timed actions of stages are looked at; None: `tuning.ANNEALING_ACTIONS`.
        tries: So many neighbours at most; None: `tuning.ANNEALING_TRIES`.
    """

    def __init__(
        self, pricing: Pricing, *, seed: int, stop: Callable[[], bool], actions: int | None = None,
        tries: int | None = None,
    ) -> None:  # fmt: skip
        self._pricing, self._table, self._stop = pricing, pricing.memory.table, stop
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._known: dict[Stages, Arrangement | None] = {}
        self._actions, self._tries = actions or tuning.ANNEALING_ACTIONS, tries or tuning.ANNEALING_TRIES

    def start(self, stages: Stages) -> Arrangement | None:
        """The stages priced; None: they break a rule or do not fit."""
        if stages not in self._known:
            self._known[stages] = self._pricing.price(stages) if self._table.may(stages) else None
        return self._known[stages]

    def run(self, first: Arrangement) -> Arrangement:
        """The best placement met on the way from `first`."""
        tries, row = 0, cache(self._row)

        def may_go_on() -> bool:
            nonlocal tries
            tries += 1
            return tries <= self._tries and self._actions > 0 and not (tries % 64 == 1 and self._stop())

        def neighbours(at: _Point) -> Iterator[_Point]:
            here = row(at)
            while True:
                place = self._neighbour(at)
                yield at if row(place) == here else place

        def price(place: _Point) -> float:
            stages = row(place)
            if stages is None:
                return math.inf
            if stages not in self._known:
                self._actions -= self._pricing.actions(stages)
            found = self.start(stages)
            return math.inf if found is None else found.value_s

        def accept(value: float, here: float) -> bool:
            if math.isinf(value):
                return False
            worse = (value - here) / here
            heat = tuning.HOT * (tuning.COLD / tuning.HOT) ** ((tries - 1) / self._tries)
            return worse <= 0 or self._random.random() < math.exp(-worse / heat)

        best, _ = local_search(
            _Point.of(first.stages), first.value_s, neighbours=neighbours, price=price, may_go_on=may_go_on,
            accept=accept,
        )  # fmt: skip
        return self._known.get(row(best) or first.stages) or first

    def _row(self, place: _Point) -> Stages | None:
        if not self._pricing.one_stage:
            return place.stages()
        masks = [0] * len(self._table.names)
        for i, w in zip(place.order, place.worker, strict=True):
            masks[w] |= 1 << i
        return self._table.in_order(masks)

    def _neighbour(self, at: _Point) -> _Point:
        kind = self._random.random()
        if kind < 0.5:
            return self._put_elsewhere(at)
        if kind < 0.7:
            return self._move(at)
        if kind < 0.8:
            return self._exchange(at)
        if self._pricing.one_stage:
            return self._join(at)
        ends = list(at.ends)
        n = self._random.randrange(len(ends))
        ends[n] = not ends[n]
        return replace(at, ends=tuple(ends))

    def _join(self, at: _Point) -> _Point:
        """A partition, with those that must be with it, goes to the worker of one that it reads or that reads it."""
        where = dict(zip(at.order, at.worker, strict=True))
        i = at.order[self._random.randrange(len(at.order))]
        near = sorted({where[j] for j in bits(self._table.before[i] | self._table.behind[i])} - {where[i]})
        if not near:
            return at
        target, moved = self._random.choice(near), self._table.together[i]
        return replace(
            at, worker=tuple(target if moved >> j & 1 else w for j, w in zip(at.order, at.worker, strict=True))
        )

    def _put_elsewhere(self, at: _Point) -> _Point:
        """Some partitions that follow each other, at most a stage's, go to another worker."""
        first = last = self._random.randrange(len(at.order))
        while last + 1 < len(at.order) and at.worker[last + 1] == at.worker[first] and self._random.random() < 0.6:
            last += 1
        target = self._random.choice(self._table.homes[at.order[first]])
        moved = 0
        for i in at.order[first : last + 1]:
            moved |= self._table.together[i]
        return replace(
            at,
            worker=tuple(target if moved >> i & 1 else w for i, w in zip(at.order, at.worker, strict=True)),
            ends=tuple(end and n not in (first, last + 1) for n, end in enumerate(at.ends)),
        )

    def _move(self, at: _Point) -> _Point:
        """One partition goes elsewhere in the order, as far as what it reads and who reads it allow."""
        n = len(at.order)
        source = self._random.randrange(n)
        i = at.order[source]
        low = max((k + 1 for k in range(source) if self._table.before[i] >> at.order[k] & 1), default=0)
        high = min((k - 1 for k in range(source + 1, n) if self._table.behind[i] >> at.order[k] & 1), default=n - 1)
        target = self._random.randint(low, high)

        def moved(row: Sequence[int], value: int) -> tuple[int, ...]:
            rest = [*row[:source], *row[source + 1 :]]
            return (*rest[:target], value, *rest[target:])

        near = at.worker[target] if self._random.random() < 0.5 else at.worker[source]
        return _Point(moved(at.order, i), moved(at.worker, near), tuple(map(bool, moved(at.ends, False))))

    def _exchange(self, at: _Point) -> _Point:
        """All partitions of two workers change places."""
        a, b = (self._random.randrange(len(self._table.names)) for _ in range(2))
        other = {a: b, b: a}
        return replace(at, worker=tuple(other.get(w, w) for w in at.worker))
