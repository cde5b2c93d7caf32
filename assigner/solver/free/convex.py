"""A sharper bound where each worker has one stage, which waits for all that it reads and sends when all is done.

As in bounds.py, with stages in place of single partitions on the ways: for a stage s of worker w,

    FT = (arrival of the last input of s) + M F(s) + (way from the end of s to the sink, through whole stages)
    step >= FT + (way from the sink back to s) + M B(s) + (way from s back to the end of an update)

Partitions that are not placed stand for themselves, with their least prices; one that joins a stage later only makes
that stage longer by what it counted before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner.solver.free.set_prices import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.free.set_memory import SetMemory

NEVER = -math.inf


class ConvexBounds:
    """Bounds of one table, with one stage a worker.

    Args:
        room: Prices and memory.
    """

    def __init__(self, room: SetMemory) -> None:
        self._room, self._table = room, room.table
        table = self._table
        self._n, self._workers = len(table.problem.order), len(table.names)
        homes = enumerate(table.homes)
        least = [
            (min(table.forward_s[w][i] for w in found), min(table.backward_s[w][i] for w in found))
            if found
            else (0.0, 0.0)
            for i, found in homes
        ]
        self._forward = [forward for forward, _ in least]
        self._backward = [backward for _, backward in least]

    def least(self, where: Sequence[int], stages: Sequence[tuple[int, int]]) -> float:
        """The bound, in seconds.

        Args:
            where: Worker of each position, -1: not placed. Whatever a placed position reads is placed.
            stages: The workers' stages in a topological order.
        """
        table, n = self._table, self._n
        # nodes: positions that are not placed, and n + w for the stage of worker w
        node = [n + w if w >= 0 else i for i, w in enumerate(where)]
        forward, backward = self._forward + [0.0] * self._workers, self._backward + [0.0] * self._workers
        update = [0.0] * (n + self._workers)
        for w, mask in stages:
            forward[n + w] = sum([table.forward_s[w][i] for i in bits(mask)])
            backward[n + w] = sum([table.backward_s[w][i] for i in bits(mask)]) + self._room.least_s(w, mask)
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
        times, found = self._table.micro_batches, 0.0
        near: dict[int, float] = {}
        for each in reversed(order):
            ways = [near[b] + seconds[b] + wire for b, wire in hops[each]]
            near[each] = 0.0 if each == sink else max(ways, default=NEVER)
            found = max(found, near[each] + times * seconds[each] + beyond[each])
            for b, wire in hops[each]:
                found = max(found, near[b] + seconds[b] + times * wire + seconds[each] + beyond[each])
        return found
