"""The problem in fewer pieces: what must or may as well share a device becomes one item.

Merged are nodes of one colour; where stages form a line, whatever lies on a cycle of the order between colours; and
nodes without any time whose move to a neighbour can only save transfers (where no device can run out of memory).
Outputs of one item with the same readers become one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from load.problem import LoadProblem, Output, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Flow:
    """What travels from one item to others.

    Args:
        source: The item that makes it.
        targets: The other items that read it, ascending.
        cost: Time of one transfer at one end, the factor included.
        held: Bytes per micro-batch in flight on every device with a reader.
        inside: The source itself reads it too: it is held there as well.
        bytes: Room that messages certainly take on the device that it leaves.
        busy: Per class of devices the seconds that messages certainly keep one from computing, if it leaves, if it
            comes in ("links").
    """

    source: int
    targets: tuple[int, ...]
    cost: float
    held: float
    inside: bool
    bytes: float
    busy: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Items:
    """A problem in items, numbered in a topological order of the line.

    Args:
        problem: What was merged.
        members: Nodes of each item.
        before: Per item, the items that may not lie behind it.
        flows: What travels between items.
        apart: Pairs of items that must not share a device.
    """

    problem: LoadProblem
    members: tuple[tuple[int, ...], ...]
    before: tuple[frozenset[int], ...]
    flows: tuple[Flow, ...]
    apart: tuple[tuple[int, int], ...]

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
    if not memory_binds(problem) and problem.transfer.rule != "links" and not problem.apart:
        while _join_idle(problem, union):
            pass
    return _items(problem, union)


def memory_binds(problem: LoadProblem) -> bool:
    """False if even everything on one device, all micro-batches in flight, would fit."""
    depth = problem.in_flight.at(problem.device_count)
    held = sum(
        max((depth * o.stored if o.stored else 0.0) + o.fixed + o.peak for o in node.options) + node.workspace
        for node in problem.nodes
    ) + sum((depth * output.held if output.held else 0.0) + 2 * output.bytes for output in problem.outputs)
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
        tuple((number[roots[u]], number[roots[v]]) for u, v in problem.apart),
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
    found: dict[tuple[int, frozenset[int]], list[float]] = {}
    busy: dict[tuple[int, frozenset[int]], tuple[tuple[float, float], ...]] = {}
    factor = problem.transfer.factor
    for output in problem.outputs:
        source, targets = item[output.source], frozenset(item[target] for target in output.targets)
        if targets == {source} and not output.held:
            continue
        sums = found.setdefault((source, targets), [0.0, 0.0, 0.0])
        if problem.transfer.busy:
            old = busy.get((source, targets), ((0.0, 0.0),) * len(problem.devices))
            more = _least_busy(problem, output)
            busy[source, targets] = tuple((a + c, b + d) for (a, b), (c, d) in zip(old, more, strict=True))
        turns = bool(output.gradients) and all(output.gradients)  # in between, what certainly comes back: nothing
        sums[0] += output.cost * factor
        sums[1] += output.held
        sums[2] += output.bytes * (1 + turns)
    return tuple(
        Flow(
            source,
            tuple(sorted(targets - {source})),
            cost,
            held,
            source in targets,
            size,
            busy.get((source, targets), ()),
        )
        for (source, targets), (cost, held, size) in found.items()
        if cost + held + size > 0 or (source, targets) in busy
    )


def _least_busy(problem: LoadProblem, output: Output) -> list[tuple[float, float]]:
    """Per class, what an output that leaves it, and one that comes in, keeps it from computing, whoever is beyond."""
    sender, receiver = problem.transfer.sender_busy, problem.transfer.receiver_busy
    turns = bool(output.gradients) and all(output.gradients)
    least = []
    for c, device in enumerate(problem.devices):
        leaves, comes = [], []
        for other in range(len(problem.devices)):
            there, back = output.seconds[c][other], output.seconds[other][c]
            if (other != c or device.count > 1) and math.isfinite(there + back):
                leaves.append(sender[c][other] * there + turns * receiver[other][c] * back)
                comes.append(receiver[other][c] * back + turns * sender[c][other] * there)
        least.append((min(leaves, default=0.0), min(comes, default=0.0)))
    return least
