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
what it counted before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.problem.perfect_split import split_among
from assigner.solver.problem.set_prices import bits

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

    tail: Sequence[float]
    back_s: float


class _Least(NamedTuple):
    """The least that is known of a placement, by position: worker, earliest start, seconds; by worker: the rest."""

    where: Sequence[int]
    masks: Sequence[int]
    head: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    again: Sequence[float]


class Bounds:
    """Bounds of one table.

    Args:
        room: Prices and memory.
    """

    def __init__(self, room: SetMemory) -> None:
        self.room, self.table = room, room.table
        table = self.table
        self.n = len(table.problem.order)
        prices = [[table.prices[w][i] for w in homes] for i, homes in enumerate(table.homes)]
        self._forward = [min((p.forward_s for p in row if p), default=math.inf) for row in prices]
        self._backward = [min((p.backward_s for p in row if p), default=math.inf) for row in prices]
        work = [
            [table.micro_batches * (p.forward_s + p.backward_s) + p.update_s if p else math.inf for p in row]
            for row in table.prices
        ]
        self._weight, self._share, self._weights = split_among(np.array(work), table.problem.most_workers)
        self._into: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.n)]
        self._from: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.n)]
        for maker, value, reader, gradient in table.edges:
            self._into[reader].append((maker, value, gradient))
            self._from[maker].append((reader, value, gradient))
        self._sinks = [i for i in range(self.n) if not table.behind[i]]
        self._before = self._reaching(gradient=False)
        self._graded = self._reaching(gradient=True)

    def _reaching(self, *, gradient: bool) -> list[int]:
        """Per position: all positions that lead to it, itself too."""
        found = [1 << i for i in range(self.n)]
        for i in range(self.n):
            for maker, _, graded in self._into[i]:
                if graded or not gradient:
                    found[i] |= found[maker]
        return found

    def least(self, where: Sequence[int], masks: Sequence[int]) -> tuple[float, list[Turn]]:
        """The bound, in seconds, and its turns.

        Args:
            where: Worker of each position, -1: not placed. Whatever a placed position reads is placed.
            masks: Positions of each worker.
        """
        table, times = self.table, self.table.micro_batches
        forward, backward = list(self._forward), list(self._backward)
        update = [0.0] * len(masks)
        again = [0.0] * len(masks)
        bound, total = 0.0, 0.0
        head = [0.0] * self.n
        for i, w in enumerate(where):
            if w >= 0:
                price = table.prices[w][i]
                assert price is not None
                forward[i], backward[i] = price.forward_s, price.backward_s
                update[w] += price.update_s
            else:
                total += self._share[i]
            head[i] = max(
                (head[j] + forward[j] + self._wire_s(where, value, j, i) for j, value, _ in self._into[i]), default=0.0
            )
        for w, mask in enumerate(masks):
            if mask:
                again[w] = self.room.least_s(w, mask)
                load = times * (sum(forward[i] + backward[i] for i in bits(mask)) + again[w]) + update[w]
                total += self._weight[w] * load
                bound = max(bound, load + min(head[i] for i in bits(mask)))
        bound = max(bound, total / self._weights if self._weights else 0.0)
        at = _Least(where, masks, head, forward, backward, update, again)
        turns = []
        for sink in self._sinks:
            tail = self._tails(sink, where, forward)
            there, back = self._there_s(sink, at, tail), self._back_s(sink, at)
            turns.append(Turn(tail, back))
            bound = max(bound, there + back)
        return bound, turns

    def _wire_s(self, where: Sequence[int], value: int, source: int, target: int) -> float:
        u, v = where[source], where[target]
        return self.table.wires[value][u][v].seconds if u >= 0 and v >= 0 and u != v else 0.0

    def _tails(self, sink: int, where: Sequence[int], forward: Sequence[float]) -> list[float]:
        tail = [NEVER] * self.n
        tail[sink] = 0.0
        for i in range(sink - 1, -1, -1):
            if self._before[sink] >> i & 1:
                tail[i] = max(
                    self._wire_s(where, value, i, j) + forward[j] + tail[j] for j, value, _ in self._from[i]
                )  # fmt: skip
        return tail

    def _there_s(self, sink: int, at: _Least, tail: Sequence[float]) -> float:
        """Seconds until the sink's last forward is over."""
        times, found = self.table.micro_batches, 0.0
        head, forward = at.head, at.forward
        for i in bits(self._before[sink]):
            found = max(found, head[i] + times * forward[i] + tail[i])
            for j, value, _ in self._into[i]:
                wire = self._wire_s(at.where, value, j, i)
                if wire:
                    found = max(found, head[j] + forward[j] + times * wire + forward[i] + tail[i])
        for mask in at.masks:
            part = list(bits(mask & self._before[sink]))
            if len(part) > 1:
                work = times * sum(forward[i] for i in part)
                found = max(found, min(head[i] for i in part) + work + min(tail[i] for i in part))
        return found

    def _back_s(self, sink: int, at: _Least) -> float:
        """Seconds from the sink's last forward to the end of the step."""
        times, graded, backward, where = self.table.micro_batches, self._graded[sink], at.backward, at.where
        head, tail = [0.0] * self.n, [0.0] * self.n
        for i in range(sink - 1, -1, -1):
            if graded >> i & 1:
                head[i] = max(
                    head[j] + backward[j] + self._wire_s(at.where, value, j, i)
                    for j, value, gradient in self._from[i]
                    if gradient and graded >> j & 1
                )
        found = 0.0
        for i in bits(graded):
            tail[i] = at.update[where[i]] if where[i] >= 0 else 0.0
            for j, value, gradient in self._into[i]:
                if gradient:
                    wire = self._wire_s(at.where, value, i, j)
                    tail[i] = max(tail[i], wire + backward[j] + tail[j])
                    if wire:
                        found = max(found, head[i] + backward[i] + times * wire + backward[j] + tail[j])
            found = max(found, head[i] + times * backward[i] + tail[i])
        for w, mask in enumerate(at.masks):
            part = list(bits(mask & graded))
            if part:
                work = times * (sum(backward[i] for i in part) + (at.again[w] if mask & graded == mask else 0.0))
                found = max(found, min(head[i] for i in part) + work + min(tail[i] for i in part))
        return found

    def convex(self, where: Sequence[int], stages: Sequence[tuple[int, int]]) -> float:
        """The sharper bound where each worker has one stage, in seconds.

        Args:
            where: Worker of each position, -1: not placed. Whatever a placed position reads is placed.
            stages: The workers' stages in a topological order.
        """
        table, n, workers = self.table, self.n, len(self.table.names)
        # nodes: positions that are not placed, and n + w for the stage of worker w
        node = [n + w if w >= 0 else i for i, w in enumerate(where)]
        forward, backward = self._forward + [0.0] * workers, self._backward + [0.0] * workers
        update = [0.0] * (n + workers)
        for w, mask in stages:
            forward[n + w] = sum([table.forward_s[w][i] for i in bits(mask)])
            backward[n + w] = sum([table.backward_s[w][i] for i in bits(mask)]) + self.room.least_s(w, mask)
            update[n + w] = sum([table.update_s[w][i] for i in bits(mask)])
        order = [n + w for w, _ in stages] + [i for i in range(n) if where[i] < 0]
        into: dict[int, list[tuple[int, float, float]]] = {each: [] for each in order}
        out: dict[int, list[tuple[int, float, float]]] = {each: [] for each in order}
        for maker, value, reader, gradient in table.edges:
            a, b = node[maker], node[reader]
            if a != b:
                there = back = 0.0
                if b >= n:
                    wires, u, v = table.wires[value], where[maker], where[reader]
                    there, back = wires[u][v].seconds, wires[v][u].seconds
                into[b].append((a, there, back if gradient else NEVER))
                out[a].append((b, there, back if gradient else NEVER))
        head: dict[int, float] = {}
        after: dict[int, float] = {}
        for each in order:
            head[each] = max((head[a] + forward[a] + there for a, there, _ in into[each]), default=0.0)
            after[each] = max(
                (back + backward[a] + after[a] for a, _, back in into[each]), default=0.0
            )  # fmt: skip
            after[each] = max(after[each], update[each])
        there_to = {each: [(b, there) for b, there, _ in ways] for each, ways in out.items()}
        back_from = {each: [(b, back) for b, _, back in ways] for each, ways in out.items()}
        bound = 0.0
        for sink in range(n):
            if not table.behind[sink]:
                turn = self._way_s(node[sink], order, there_to, head, forward)
                bound = max(bound, turn + self._way_s(node[sink], order, back_from, after, backward))
        return bound

    def _way_s(
        self, sink: int, order: Sequence[int], hops: dict[int, list[tuple[int, float]]], beyond: dict[int, float],
        seconds: Sequence[float],
    ) -> float:  # fmt: skip
        """Seconds between the sink and the far end of the step, one way.

        Args:
            sink: Its node.
            order: The nodes in a topological order.
            hops: Of each node those behind it, with the seconds of the message; -inf: there is none this way.
            beyond: Seconds between each node and the far end.
            seconds: Of each node, one micro-batch.
        """
        times, found = self.table.micro_batches, 0.0
        near: dict[int, float] = {}
        for each in reversed(order):
            ways = [near[b] + seconds[b] + wire for b, wire in hops[each]]
            near[each] = 0.0 if each == sink else max(ways, default=NEVER)
            found = max(found, near[each] + times * seconds[each] + beyond[each])
            for b, wire in hops[each]:
                found = max(found, near[b] + seconds[b] + times * wire + seconds[each] + beyond[each])
        return found
