"""Order in a directed graph of names."""

from __future__ import annotations

import heapq
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from assigner.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def topological_order(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """`names` so that every edge leads forward; among the free ones the earliest in `names` comes first.

    Raises:
        FormatError: the edges form a cycle; the message names one.
    """
    position = {name: n for n, name in enumerate(names)}
    waiting: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(names, ()))
    for source, target in edges:
        waiting.add(target, source)
    try:
        waiting.prepare()
    except CycleError as error:
        raise FormatError(f"edges: the graph has a cycle: {' -> '.join(error.args[1])}") from None
    order: list[str] = []
    free: list[int] = []
    while waiting.is_active():
        for name in waiting.get_ready():
            heapq.heappush(free, position[name])
        order.append(names[heapq.heappop(free)])
        waiting.done(order[-1])
    return tuple(order)


def topological_orders(
    names: Sequence[str], edges: Iterable[tuple[str, str]], *, most: int
) -> tuple[tuple[str, ...], ...]:
    """Every order of `names`, itself the first, in which all edges lead forward; empty: there are more than `most`."""
    successors: dict[str, set[str]] = {name: set() for name in names}
    for source, target in edges:
        successors[source].add(target)
    position = {name: n for n, name in enumerate(names)}
    found: list[tuple[str, ...]] = []
    begun: list[tuple[str, ...]] = [()]  # each leads to one order or more
    while begun:
        order = list(begun.pop())
        left = sorted(set(names).difference(order), key=position.__getitem__)
        waits = dict.fromkeys(names, 0)
        for name in left:
            for target in successors[name]:
                waits[target] += 1
        free = [name for name in left if not waits[name]]
        while free:
            begun += [(*order, other) for other in reversed(free[1:])]
            if len(found) + len(begun) >= most:
                return ()
            order.append(free.pop(0))
            freed = []
            for target in successors[order[-1]]:
                waits[target] -= 1
                if not waits[target]:
                    freed.append(target)
            free = sorted([*free, *freed], key=position.__getitem__)
        found.append(tuple(order))
    return tuple(found)
