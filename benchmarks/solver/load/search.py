"""The search: a good placement first, then the proof.

A line: dynamic programs along single topological orders, each with the best so far as its limit; then over all
downsets, which proves the best; where there are too many of those, staircase programs, one for each position of the
unlike devices in the line, the best so far as their cutoff. A free placement: annealing from the best line, then the
integer program with what it found as cutoff.
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.solver.problem.options import SolverName
from load.anneal import Annealer
from load.downsets import all_downsets, along, some_orders
from load.evaluate import evaluate
from load.items import contract
from load.lattice import Lattice, OutOfTimeError
from load.problem import LoadAnswer
from load.remat import choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from load.problem import LoadProblem, Stage

_DOWNSETS = 150_000
_MANY = 10_000
_ORDERS = 6
_ROUNDS = 8
_FRUITLESS = 5
_STEPS, _STEPS_PER_ITEM = 200_000, 1_000
_TIGHT = 1e-9


@dataclass(frozen=True)
class LoadOptions:
    """What is asked of the search.

    Args:
        solver: The ILP solver under PuLP.
        seed: Of everything random.
        time_limit: Seconds.
        gap: Stop when the value is proven to be within this share of the best possible.
        downsets: Beyond so many, integer programs prove the bound instead of the dynamic program.
    """

    solver: SolverName = "highs"
    seed: int = 0
    time_limit: float = 30.0
    gap: float = 1e-6
    downsets: int = _DOWNSETS


def solve_load(problem: LoadProblem, options: LoadOptions | None = None) -> LoadAnswer:
    """The placement with the smallest largest load, with a proven bound.

    Args:
        problem: What is placed, and how loads are counted.
        options: None: the defaults.

    Raises:
        KeyboardInterrupt: Ctrl-C before anything was found; later the best so far is the answer.
    """
    search = _Search(problem, options or LoadOptions())
    try:
        if problem.contiguous:
            search.line()
        else:
            search.free()
    except KeyboardInterrupt:
        if not search.found:
            raise
    return search.answer()


class _Search:
    """The best placement so far, and what is proven."""

    def __init__(self, problem: LoadProblem, options: LoadOptions) -> None:
        self._problem, self._options = problem, options
        self._start = time.monotonic()
        self._deadline = self._start + options.time_limit
        self._items = contract(problem)
        self._stages: tuple[Stage, ...] = ()
        self._value, self._bound = math.inf, 0.0
        self._found_by = self._proven_by = ""
        whole = Lattice(self._items, [0, (1 << self._items.count) - 1])
        self._raise_bound(whole.least_load(), "total work")

    def answer(self) -> LoadAnswer:
        """What is known now."""
        infeasible = math.isinf(self._value) and math.isinf(self._bound)
        return LoadAnswer(
            self._stages, self._value, min(self._bound, self._value),
            self._found_by, self._proven_by,
            time.monotonic() - self._start, infeasible,
        )  # fmt: skip

    @property
    def found(self) -> bool:
        """True if there is a placement."""
        return bool(self._stages)

    def line(self) -> None:
        """A contiguous placement."""
        self._orders()
        if self._closed():
            return
        downsets = all_downsets(self._items, most=self._options.downsets)
        if downsets is not None:
            self._lattice(downsets)
        if not self._closed() and downsets is None and self._problem.replicas == 1:  # no integer program knows those
            self._staircases()

    def _orders(self) -> None:
        orders = some_orders(self._items, count=_ORDERS, seed=self._options.seed)
        tried = set()
        for chosen in [*([order] for order in orders), orders]:
            downsets = along(chosen)
            if tuple(downsets) in tried:
                continue
            tried.add(tuple(downsets))
            with suppress(OutOfTimeError):
                found = Lattice(self._items, downsets).search(
                    limit=self._value, deadline=self._soon(0.3), gap=self._options.gap
                )
                self._take(found.stages, "dynamic program along orders")

    def _lattice(self, downsets: Sequence[int]) -> None:
        name = f"dynamic program over {len(downsets)} downsets"
        lattice = Lattice(self._items, downsets)
        for limit in self._limits(many=len(downsets) > _MANY):
            try:
                found = lattice.search(limit=limit, deadline=self._deadline, gap=self._options.gap)
            except OutOfTimeError:
                return
            self._take(found.stages, name)
            self._raise_bound(found.bound, name)
            if self._closed():
                return

    def _limits(self, *, many: bool) -> list[float]:
        """Limits of the search over downsets: of many, first one half-way to the bound, which far fewer can meet."""
        if many and math.isfinite(self._value):
            return [(self._bound + self._value) / 2, self._value]
        return [self._value]

    def _staircases(self) -> None:
        counts = [device.count for device in self._problem.devices]
        sequences = list(itertools.islice(_sequences(counts), 1000))
        if len(sequences) == 1000:  # too many orders of unlike devices
            return
        bound = math.inf
        for left, sequence in zip(range(len(sequences), 0, -1), sequences, strict=True):
            bound = min(bound, self._program(sequence, "staircase program", left))
        self._raise_bound(bound, f"{len(sequences)} staircase programs")

    def free(self) -> None:
        """A placement of any items on any device."""
        classes = [c for c, device in enumerate(self._problem.devices) for _ in range(device.count)]
        start = self._first_free(classes)
        if start is not None:
            self._take_items(_by_device(start, len(classes)), classes, "best line")
            self._anneal(start, classes)
        if self._closed():
            return
        self._raise_bound(self._program(classes, "integer program", 1), "integer program")

    def _program(self, classes: Sequence[int], name: str, parts: int) -> float:
        """A bound of placements on devices of these classes, by the ILP in one of so many parts of the time left."""
        from assigner.solver.ilp.linear import Backend
        from load.model import PlacementModel

        unit = (self._value if math.isfinite(self._value) else self._bound) / 1000 or 1.0
        model = PlacementModel(self._items, classes, cutoff=self._value, unit=unit)
        outcome = Backend(self._options.solver, self._options.seed).search(
            model.problem, gap=self._options.gap, cutoff=self._value / unit,
            time_limit=max(0.1, (self._deadline - time.monotonic()) / parts),
        ).scaled(unit)  # fmt: skip
        if outcome.found:
            self._take_items(model.placement(), classes, name)
        return outcome.bound

    def _first_free(self, classes: list[int]) -> list[int] | None:
        """The best line as a free placement, an item's device each; None: no line was found."""
        line = replace(self._problem, contiguous=True)
        seconds = self._soon(0.2) - time.monotonic()
        found = solve_load(line, replace(self._options, time_limit=seconds))
        if found.stages:
            free = list(range(len(classes)))
            where: dict[int, int] = {}
            for stage in found.stages:
                device = next(d for d in free if classes[d] == stage.device)
                free.remove(device)
                where |= dict.fromkeys(stage.nodes, device)
            return [where[members[0]] for members in self._items.members]
        return None

    def _anneal(self, start: list[int], classes: list[int]) -> None:
        soon, steps = self._soon(0.4), min(_STEPS, _STEPS_PER_ITEM * self._items.count)
        fruitless, best = 0, start
        for number in range(_ROUNDS):
            before = self._value
            annealer = Annealer(self._items, classes, seed=self._options.seed + number)
            found = annealer.improve(best if number % 2 else start, steps=steps, deadline=soon)
            self._take_items(_by_device(found, len(classes)), classes, "annealing")
            if self._value < before:
                best = found
            fruitless = 0 if self._value < before * (1 - _TIGHT) else fruitless + 1
            if fruitless == _FRUITLESS:
                return

    def _take_items(self, placed: list[list[int]], classes: Sequence[int], name: str) -> None:
        """Take a placement given in items, its second options chosen anew."""
        stages = []
        used = [(items, c) for items, c in zip(placed, classes, strict=True) if items]
        for s, (items, c) in enumerate(used):
            plain = self._items.stage(c, items)
            choice = choose(self._problem, plain.nodes, device=c, position=len(used) - s)
            if choice is None:
                return
            stages.append(self._items.stage(c, items, choice.again))
        self._take(tuple(stages), name)

    def _take(self, stages: tuple[Stage, ...] | None, name: str) -> None:
        """Keep a placement if it is the best so far."""
        if stages is None:
            return
        value = evaluate(self._problem, stages).value
        if value < self._value:
            self._stages, self._value, self._found_by = stages, value, name

    def _raise_bound(self, bound: float, name: str) -> None:
        if bound > self._bound or not self._proven_by:
            self._bound, self._proven_by = bound, name

    def _closed(self) -> bool:
        if math.isinf(self._value):
            return math.isinf(self._bound)
        return self._value - self._bound <= max(self._options.gap, _TIGHT) * self._value

    def _soon(self, share: float) -> float:
        """The moment when so much of the time is gone."""
        return self._start + share * self._options.time_limit


def _sequences(counts: list[int]) -> Iterator[list[int]]:
    """Every order of devices in a line, by class."""
    if not any(counts):
        yield []
        return
    for c, number in enumerate(counts):
        if number:
            for rest in _sequences([*counts[:c], number - 1, *counts[c + 1 :]]):
                yield [c, *rest]


def _by_device(at: Sequence[int], devices: int) -> list[list[int]]:
    placed: list[list[int]] = [[] for _ in range(devices)]
    for item, device in enumerate(at):
        placed[device].append(item)
    return placed
