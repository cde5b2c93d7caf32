"""Which nodes of one stage run by their second option: a knapsack of the stage's own.

Whatever the other stages do, a stage's load grows with the time that its second options add, so the least added time
that fits its memory is best. `Choices.bound` is the fractional knapsack for many stages at once; `choose` is exact.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from load.evaluate import stage_memory
from load.problem import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from load.items import Items
    from load.problem import LoadProblem

_STEPS = 20_000
"""Branch-and-bound steps for one stage; beyond them the best found is a choice, and the fractional bound holds."""


@dataclass(frozen=True)
class Choice:
    """Second options of a stage.

    Args:
        again: Nodes that run by it.
        added: Seconds that they add.
        bound: No choice that fits adds less.
    """

    again: tuple[int, ...]
    added: float
    bound: float


def choose(problem: LoadProblem, nodes: Sequence[int], *, device: int, position: int) -> Choice | None:
    """The cheapest second options with which a stage fits its device, a minimum knapsack; None: it does not fit.

    Args:
        problem: What is placed.
        nodes: The stage's nodes, ascending.
        device: Its class.
        position: Its position from the end of the line.
    """
    base = stage_memory(problem, Stage(device, tuple(nodes), (0,) * len(nodes)), position=position)
    need = base - problem.devices[device].memory * (1 + 1e-12)
    if need <= 0:
        return Choice((), 0.0, 0.0)
    depth = problem.in_flight(position)
    items = []
    for node in nodes:
        first, *second = problem.nodes[node].options
        for other in second:
            saved = (depth * (first.stored - other.stored)) + first.fixed - other.fixed
            added = other.seconds[device] - first.seconds[device]
            if saved > 0 and math.isfinite(added):
                items.append(_Item(node, max(0.0, added), saved))
    if sum(item.saved for item in items) < need:
        return None
    return _cover(sorted(items, key=lambda item: (item.added / item.saved, item.node)), need)


@dataclass(frozen=True)
class _Item:
    node: int
    added: float
    saved: float


def _cover(items: Sequence[_Item], need: float) -> Choice:
    """The cheapest items that save `need`, cheapest per byte first, depth first; added inf: none was found in time.

    Filling up in that order, the last item in part, is the lower bound at each step.
    """
    saved_up_to = list(itertools.accumulate((item.saved for item in items), initial=0.0))
    added_up_to = list(itertools.accumulate((item.added for item in items), initial=0.0))

    def bound(at: int, missing: float) -> float:
        filled = bisect_left(saved_up_to, saved_up_to[at] + missing, lo=at)
        if filled > len(items):
            return math.inf
        last = items[filled - 1]
        over = (saved_up_to[filled] - saved_up_to[at] - missing) / last.saved
        return added_up_to[filled] - added_up_to[at] - over * last.added

    root = bound(0, need)
    best, found, steps = math.inf, None, 0
    work: list[tuple[int, float, float, _Trail | None]] = [(0, need, 0.0, None)]
    while work and steps < _STEPS:
        steps += 1
        at, missing, added, taken = work.pop()
        if missing <= 0:
            if added < best:
                best, found = added, taken
            continue
        if at == len(items) or added + bound(at, missing) >= best * (1 - 1e-12):
            continue
        item = items[at]
        work.append((at + 1, missing, added, taken))
        work.append((at + 1, missing - item.saved, added + item.added, _Trail(item.node, taken)))
    return Choice(tuple(sorted(_nodes(found))), best, max(root, 0.0) if work else best)


@dataclass(frozen=True)
class _Trail:
    node: int
    before: _Trail | None


def _nodes(trail: _Trail | None) -> tuple[int, ...]:
    found = []
    while trail is not None:
        found.append(trail.node)
        trail = trail.before
    return tuple(found)


class Choices:
    """Fractional knapsacks of many stages at once, for one class of devices and one position.

    Args:
        items: The problem's items.
        device: The class.
        position: Position from the end of the line.
    """

    def __init__(self, items: Items, device: int, position: int) -> None:
        problem, depth = items.problem, items.problem.in_flight(position)
        found = []
        for number, members in enumerate(items.members):
            for node in members:
                first, *second = problem.nodes[node].options
                for other in second:
                    saved = depth * (first.stored - other.stored) + first.fixed - other.fixed
                    added = other.seconds[device] - first.seconds[device]
                    if saved > 0 and math.isfinite(added):
                        found.append((max(0.0, added) / saved, number, saved, max(0.0, added)))
        found.sort()
        self._item = np.array([entry[1] for entry in found], dtype=np.intp)
        self._saved = np.array([entry[2] for entry in found])
        self._added = np.array([entry[3] for entry in found])

    def bound(self, inside: NDArray[np.bool_], need: NDArray[np.float64]) -> NDArray[np.float64]:
        """Least seconds added, in part options too; inf where all second options together save too little.

        Args:
            inside: Row per stage, column per item: the stage holds it.
            need: Bytes that each stage must save.
        """
        if not len(self._item):
            return np.where(need > 0, np.inf, 0.0)
        held = inside[:, self._item]
        saved = np.cumsum(held * self._saved, axis=1)
        added = np.cumsum(held * self._added, axis=1)
        enough = saved >= need[:, None]
        last = np.argmax(enough, axis=1)
        rows = np.arange(len(need))
        over = (saved[rows, last] - need) / self._saved[last]
        result = np.maximum(added[rows, last] - over * self._added[last], 0.0)
        return np.where(enough[:, -1], result, np.inf)
