"""The problem in fewer pieces: what must or may as well share a device becomes one item.

Merged are nodes of one colour; where stages form a line, whatever lies on a cycle of the order between colours; and
nodes without any time whose move to a neighbour can only save transfers (where no device can run out of memory).
Outputs of one item with the same readers become one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from load.problem import LoadProblem, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Flow:
    """What travels from one item to others.

    Args:
        source: The item that makes it.
        targets: The other items that read it, ascending.
        cost: Time of one transfer at one end, the factor included.
    """

    source: int
    targets: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Items:
    """A problem in items, numbered in a topological order of the line.

    Args:
        problem: What was merged.
        members: Nodes of each item.
        before: Per item, the items that may not lie behind it.
        flows: What travels between items.
    """

    problem: LoadProblem
    members: tuple[tuple[int, ...], ...]
    before: tuple[frozenset[int], ...]
    flows: tuple[Flow, ...]

    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.members)

    def stage(self, device: int, items: Iterable[int], again: Iterable[int] = ()) -> Stage:
        """The stage that holds these items on a device of this class, the nodes in `again` by their second option."""
        nodes = sorted(node for item in items for node in self.members[item])
        second = set(again)
        return Stage(device, tuple(nodes), tuple(int(node in second) for node in nodes))


def contract(problem: LoadProblem) -> Items:
    """Merge what shares a device in every placement, or in one of the best."""
    union = _Union(len(problem.nodes))
    by_colour: dict[int | str, int] = {}
    for n, node in enumerate(problem.nodes):
        if node.colour is not None:
            union.join(by_colour.setdefault(node.colour, n), n)
    if problem.contiguous:
        _join_cycles(problem, union)
    if not memory_binds(problem):
        while _join_idle(problem, union):
            pass
    return _items(problem, union)


def memory_binds(problem: LoadProblem) -> bool:
    """False if even everything on one device, all micro-batches in flight, would fit."""
    depth = problem.in_flight(problem.device_count)
    held = sum(max(depth * o.stored + o.fixed for o in node.options) for node in problem.nodes)
    return any(held > device.memory for device in problem.devices)


class _Union:
    """Sets of nodes, joined two at a time."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        self._parent[max(one, other)] = min(one, other)


def _join_cycles(problem: LoadProblem, union: _Union) -> None:
    """Sets of one strong component share a stage. Source: R. Tarjan, SIAM J. Comput. 1(2), 1972, without recursion."""
    successors: dict[int, set[int]] = defaultdict(set)
    for u, v in problem.order:
        if union.root(u) != union.root(v):
            successors[union.root(u)].add(union.root(v))
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    trail: list[int] = []
    on_trail: set[int] = set()
    for start in sorted({union.root(n) for n in range(len(problem.nodes))}):
        if start in index:
            continue
        work = [(start, iter(sorted(successors[start])))]
        index[start] = low[start] = len(index)
        trail.append(start)
        on_trail.add(start)
        while work:
            node, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    while True:
                        member = trail.pop()
                        on_trail.discard(member)
                        union.join(node, member)
                        if member == node:
                            break
            elif child not in index:
                index[child] = low[child] = len(index)
                trail.append(child)
                on_trail.add(child)
                work.append((child, iter(sorted(successors[child]))))
            elif child in on_trail:
                low[node] = min(low[node], index[child])


def _join_idle(problem: LoadProblem, union: _Union) -> bool:
    """Merge items without any time into a neighbour where that never costs more; True if one was merged.

    An item that one other item alone deals with saves all its transfers there, and no third one is in its way.
    """
    readers: dict[int, set[int]] = defaultdict(set)
    sources: dict[int, set[int]] = defaultdict(set)
    for u, v in [*problem.order, *((o.source, target) for o in problem.outputs for target in o.targets)]:
        if union.root(u) != union.root(v):
            readers[union.root(u)].add(union.root(v))
            sources[union.root(v)].add(union.root(u))
    busy = {
        union.root(n)
        for n, node in enumerate(problem.nodes)
        if node.sync or any(option.seconds != (0.0,) * len(problem.devices) for option in node.options)
    }
    joined: set[int] = set()
    for node in range(len(problem.nodes)):
        if union.root(node) != node or node in busy:
            continue
        around = readers[node] | sources[node]
        if len(around) == 1 and not around & joined and node not in joined:
            joined |= {node, *around}
            union.join(node, next(iter(around)))
    return bool(joined)


def _items(problem: LoadProblem, union: _Union) -> Items:
    roots = [union.root(n) for n in range(len(problem.nodes))]
    after: dict[int, set[int]] = defaultdict(set)
    for u, v in problem.order if problem.contiguous else ():
        if roots[u] != roots[v]:
            after[roots[u]].add(roots[v])
    number = {root: n for n, root in enumerate(_topological(sorted(set(roots)), after))}
    members: list[list[int]] = [[] for _ in number]
    for n, root in enumerate(roots):
        members[number[root]].append(n)
    before: list[set[int]] = [set() for _ in number]
    for u, found in after.items():
        for v in found:
            before[number[v]].add(number[u])
    return Items(
        problem,
        tuple(map(tuple, members)),
        tuple(map(frozenset, before)),
        _flows(problem, [number[root] for root in roots]),
    )


def _topological(names: Sequence[int], after: dict[int, set[int]]) -> list[int]:
    """Depth first from the ends, so that branches stay together."""
    before: dict[int, set[int]] = defaultdict(set)
    for u, found in after.items():
        for v in found:
            before[v].add(u)
    order: list[int] = []
    done: set[int] = set()
    for end in names:
        work = [end]
        while work:
            node = work[-1]
            waiting = sorted(before[node] - done)
            if node in done:
                work.pop()
            elif waiting:
                work.append(waiting[0])
            else:
                done.add(node)
                order.append(node)
                work.pop()
    return order


def _flows(problem: LoadProblem, item: Sequence[int]) -> tuple[Flow, ...]:
    cost: dict[tuple[int, frozenset[int]], float] = defaultdict(float)
    for output in problem.outputs:
        source = item[output.source]
        targets = frozenset(item[target] for target in output.targets) - {source}
        if targets:
            cost[source, targets] += output.cost * problem.transfer.factor
    return tuple(
        Flow(source, tuple(sorted(targets)), seconds) for (source, targets), seconds in cost.items() if seconds > 0
    )
