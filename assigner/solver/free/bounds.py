"""Bounds of all rows that put partitions on given workers, some of them not placed yet.

For a sink t (a partition that nobody reads) the last forward of t is over no sooner than, for each worker w with the
positions A that t depends on,

    FT = (earliest start among A) + M sum f(A) + (least way from A to t)

and no backward that comes from t starts before that. With G the positions on w that t's gradient reaches,

    step >= FT + (least way from t to G) + M sum b(G) + (least way from G to the end of an update)

Ways are longest paths of one micro-batch. The same holds with one position, or one message, in place of A or G; and
M sum (f + b) + u of one worker is a bound by itself. What is not placed counts with its least price, its messages not.

Where each worker has one stage, which waits for all that it reads and sends when all is done, the same is sharper with
stages in place of single partitions on the ways: for a stage s of worker w,

    FT = (arrival of the last input of s) + M F(s) + (way from the end of s to the sink, through whole stages)
    step >= FT + (way from the sink back to s) + M B(s) + (way from s back to the end of an update)

Partitions that are not placed stand for themselves there; one that joins a stage later only makes that stage longer by
what it counted before. Both bounds are ways through a graph whose nodes are positions, or stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.problem.perfect_split import split_among
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from assigner.solver.problem.set_memory import SetMemory

NEVER = -math.inf


@dataclass(frozen=True)
class Turn:
    """What is known about the turn from forward to backward at one sink.

    Args:
        tail: Per position, seconds from the end of its last forward to that of the sink; -inf: no way to it.
        back_s: Seconds that the step takes from there on, at least.
    """

    tail: Mapping[int, float]
    back_s: float


class _Nodes(NamedTuple):
    """A graph of positions, or of stages, one way of the step: towards a sink, or back from it.

    Args:
        order: The nodes in a topological order.
        hops: Of each node those behind it, with the seconds of the message; -inf: there is none this way.
        seconds: Of each node, one micro-batch.
        beyond: Seconds between each node and the far end of the step, at least.
        held: Nodes that share a worker, and what it computes of one micro-batch beyond them once all are in the way.
    """

    order: Sequence[int]
    hops: Mapping[int, Sequence[tuple[int, float]]]
    seconds: Sequence[float]
    beyond: Mapping[int, float]
    held: Sequence[tuple[Sequence[int], float]] = ()

    def way_s(self, sink: int, times: int) -> tuple[float, dict[int, float]]:
        """Seconds between the sink and the far end with so many micro-batches; and from the end of each node to it."""
        seconds, beyond, found = self.seconds, self.beyond, 0.0
        near: dict[int, float] = {}
        for each in reversed(self.order):
            ways = [near[b] + seconds[b] + wire for b, wire in self.hops[each]]
            here = near[each] = 0.0 if each == sink else max(ways, default=NEVER)
            if here == NEVER:
                continue
            found = max(found, here + times * seconds[each] + beyond[each])
            for b, wire in self.hops[each]:
                if wire:
                    found = max(found, near[b] + seconds[b] + times * wire + seconds[each] + beyond[each])
        for nodes, longer in self.held:
            part = [i for i in nodes if near[i] > NEVER]
            if part:
                work = sum([seconds[i] for i in part]) + (longer if len(part) == len(nodes) else 0.0)
                found = max(found, min([beyond[i] for i in part]) + times * work + min([near[i] for i in part]))
        return found, near


class Bounds:
    """Bounds of one table."""

    def __init__(self, memory: SetMemory) -> None:
        self.memory, self.table = memory, memory.table
        table = self.table
        self.n = len(table.problem.order)
        forward, backward, update = map(np.array, (table.forward_s, table.backward_s, table.update_s))
        self._forward, self._backward = forward.min(axis=0).tolist(), backward.min(axis=0).tolist()
        work = table.micro_batches * (forward + backward) + update
        self._weight, self._share, self._weights = split_among(work, table.most_workers)
        self._sinks = [i for i in range(self.n) if not table.behind[i]]

    def least(self, where: Sequence[int], masks: Sequence[int]) -> tuple[float, list[Turn]]:
        """The bound, in seconds, and its turns; arguments as of `StepPricing.least`."""
        table, times = self.table, self.table.micro_batches
        forward, backward = list(self._forward), list(self._backward)
        update, total, bound = [0.0] * len(masks), 0.0, 0.0
        for i, w in enumerate(where):
            if w >= 0:
                forward[i], backward[i] = table.forward_s[w][i], table.backward_s[w][i]
                update[w] += table.update_s[w][i]
            else:
                total += self._share[i]
        held = [(w, list(bits(mask)), self.memory.least_s(w, mask)) for w, mask in enumerate(masks) if mask]
        there, back = self._both_ways(
            where, range(self.n), range(self.n), (forward, backward), [update[w] if w >= 0 else 0.0 for w in where]
        )
        there = there._replace(held=[(positions, 0.0) for _, positions, _ in held])
        back = back._replace(held=[(positions, again) for _, positions, again in held])
        for w, positions, again in held:
            load = times * (sum([forward[i] + backward[i] for i in positions]) + again) + update[w]
            total += self._weight[w] * load
            bound = max(bound, load + min([there.beyond[i] for i in positions]))
        bound = max(bound, total / self._weights if self._weights else 0.0)
        turns = []
        for sink in self._sinks:
            turn, tail = there.way_s(sink, times)
            rest, _ = back.way_s(sink, times)
            turns.append(Turn(tail, rest))
            bound = max(bound, turn + rest)
        return bound, turns

    def convex(self, where: Sequence[int], stages: Sequence[tuple[int, int]]) -> float:
        """The sharper bound where each worker has one stage, these in a topological order, in seconds."""
        table, n, workers = self.table, self.n, len(self.table.names)
        # nodes: positions that are not placed, and n + w for the stage of worker w
        node = [n + w if w >= 0 else i for i, w in enumerate(where)]
        forward, backward = self._forward + [0.0] * workers, self._backward + [0.0] * workers
        update = [0.0] * (n + workers)
        for w, mask in stages:
            forward[n + w] = sum([table.forward_s[w][i] for i in bits(mask)])
            backward[n + w] = sum([table.backward_s[w][i] for i in bits(mask)]) + self.memory.least_s(w, mask)
            update[n + w] = sum([table.update_s[w][i] for i in bits(mask)])
        order = [n + w for w, _ in stages] + [i for i in range(n) if where[i] < 0]
        there, back = self._both_ways(where, node, order, (forward, backward), update)
        times = table.micro_batches
        return max(there.way_s(node[sink], times)[0] + back.way_s(node[sink], times)[0] for sink in self._sinks)

    def _both_ways(
        self, where: Sequence[int], node: Sequence[int], order: Sequence[int],
        seconds: tuple[Sequence[float], Sequence[float]], update: Sequence[float],
    ) -> tuple[_Nodes, _Nodes]:  # fmt: skip
        """Ways from the start of the step to a sink, and from there to its end.

        `node` is that of each position, `order` has the nodes in a topological order, `seconds` a forward and a
        backward of each, `update` the seconds of its worker's update.
        """
        forward, backward = seconds
        into: dict[int, list[tuple[int, float, float]]] = {each: [] for each in order}
        ahead: dict[int, list[tuple[int, float]]] = {each: [] for each in order}
        graded: dict[int, list[tuple[int, float]]] = {each: [] for each in order}
        for maker, value, reader, gradient in self.table.edges:
            a, b, u, v = node[maker], node[reader], where[maker], where[reader]
            if a != b:
                there = back = 0.0
                if v >= 0 and u != v:
                    wires = self.table.wires[value]
                    there, back = wires[u][v].seconds, wires[v][u].seconds
                back = back if gradient else NEVER
                into[b].append((a, there, back))
                ahead[a].append((b, there))
                graded[a].append((b, back))
        head: dict[int, float] = {}
        after: dict[int, float] = {}
        for each in order:
            head[each] = max([head[a] + forward[a] + there for a, there, _ in into[each]], default=0.0)
            longest = max([back + backward[a] + after[a] for a, _, back in into[each]], default=0.0)
            after[each] = max(longest, update[each])
        return _Nodes(order, ahead, forward, head), _Nodes(order, graded, backward, after)
