"""Order in a directed graph of names."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def topological_order(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """`names` so that every edge leads forward; among the free ones the earliest in `names` comes first.

    Source: A. B. Kahn, Topological sorting of large networks, CACM 5(11), 1962.

    Raises:
        FormatError: the edges form a cycle; the message names one.
    """
    position = {name: n for n, name in enumerate(names)}
    successors: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        successors[source].add(target)
    waits = dict.fromkeys(names, 0)
    for targets in successors.values():
        for target in targets:
            waits[target] += 1
    free = [position[name] for name in names if not waits[name]]
    heapq.heapify(free)
    order = []
    while free:
        name = names[heapq.heappop(free)]
        order.append(name)
        for target in successors[name]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(free, position[target])
    if len(order) < len(names):
        rest = set(names) - set(order)
        raise FormatError(f"edges: the graph has a cycle: {' -> '.join(_cycle(rest, successors))}")
    return tuple(order)


def _cycle(rest: set[str], successors: dict[str, set[str]]) -> list[str]:
    """One cycle among `rest`: walk backwards, since each of `rest` waits for another of `rest`."""
    predecessor = {target: source for source in sorted(rest) for target in successors[source] & rest}
    trail = [min(rest)]
    while trail.count(trail[-1]) == 1:
        trail.append(predecessor[trail[-1]])
    return trail[trail.index(trail[-1]) :][::-1]


def topological_orders(
    names: Sequence[str], edges: Iterable[tuple[str, str]], *, most: int
) -> tuple[tuple[str, ...], ...]:
    """Every order of `names` in which all edges lead forward; empty: there are more than `most`.

    Args:
        names: In a topological order, which is the first one found.
        edges: Pairs of names.
        most: So many orders at most.
    """
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
