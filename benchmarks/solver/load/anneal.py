"""Free placements by simulated annealing: any item on any device.

The energy is the logarithm of a sum of powers of the loads, which the largest load rules and the others still move; a
step moves one item to a device, preferably a neighbour's, swaps two, or moves a few that are connected. Steps are
counted, not timed, so the same seed gives the same placement unless time runs short.

Source: S. Kirkpatrick, C. Gelatt, M. Vecchi, Optimization by Simulated Annealing, Science 220, 1983.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from load.items import Items

_POWER = 12
_HOT, _COLD = 0.3, 1e-4
_CHECK = 512
_BLOB = 5


class Annealer:
    """The loads of one free placement, kept up to date as items move.

    Args:
        items: The problem's items.
        classes: The class of each device.
        seed: Of the random steps.
    """

    def __init__(self, items: Items, classes: Sequence[int], *, seed: int) -> None:
        problem = items.problem
        self._rng = random.Random(seed)  # noqa: S311 - a search, not a secret
        self._count, self._devices = items.count, len(classes)
        by_class = [
            [
                sum(problem.nodes[node].options[0].seconds[c] for node in members)
                for c in range(len(problem.devices))
            ]
            for members in items.members
        ]  # fmt: skip
        self._seconds = [[row[c] for c in classes] for row in by_class]
        self._size = [
            sum(o.stored + o.fixed for o in (problem.nodes[node].options[0] for node in members))
            for members in items.members
        ]
        self._room = [problem.devices[c].memory for c in classes]
        self._pays = [problem.devices[c].pays for c in classes]
        flows = [flow for flow in items.flows if flow.cost > 0 and flow.targets]
        self._flows = [(flow.source, flow.targets, flow.cost) for flow in flows]
        touching: list[list[int]] = [[] for _ in range(items.count)]
        for f, (source, targets, _) in enumerate(self._flows):
            for item in (source, *targets):
                touching[item].append(f)
        self._touching = touching
        self._around = [
            sorted({item for f in found for item in (self._flows[f][0], *self._flows[f][1])} - {i})
            for i, found in enumerate(touching)
        ]

    def improve(self, start: Sequence[int], *, steps: int, deadline: float) -> list[int]:
        """The best placement met on the way from `start`, as a device per item.

        Args:
            start: A placement that fits.
            steps: Steps from hot to cold.
            deadline: Monotonic seconds at which to stop.
        """
        rng, at = self._rng, list(start)
        compute, into, out, size = self._all(at)
        scale = max(self._loads(compute, into, out)) or 1.0
        energy = self._energy(self._loads(compute, into, out), scale)
        best, best_at = scale, list(at)
        heat = _HOT
        for step in range(steps):
            if step % _CHECK == 0:
                if time.monotonic() > deadline:
                    break
                heat = _HOT * (_COLD / _HOT) ** (step / steps)
            moves = self._moves(at)
            if not moves or not self._fits(moves, at, size):
                continue
            new = compute[:], into[:], out[:]
            before = {item: at[item] for item in moves}
            self._move(moves, at, *new)
            loads = self._loads(*new)
            found = self._energy(loads, scale)
            if found > energy and rng.random() >= math.exp((energy - found) / heat):
                for item, device in before.items():
                    at[item] = device
                continue
            compute, into, out = new
            energy = found
            for item, device in moves.items():
                size[before[item]] -= self._size[item]
                size[device] += self._size[item]
            if max(loads) < best * (1 - 1e-9):
                best, best_at = max(loads), list(at)
        return best_at

    def _energy(self, loads: Iterable[float], scale: float) -> float:
        return math.log(sum((load / scale) ** _POWER for load in loads) or 1e-300)

    def _loads(self, compute: list[float], into: list[float], out: list[float]) -> list[float]:
        return [a + b + c for a, b, c in zip(compute, into, out, strict=True)]

    def _all(self, at: list[int]) -> tuple[list[float], list[float], list[float], list[float]]:
        compute, into, out, size = ([0.0] * self._devices for _ in range(4))
        for item, device in enumerate(at):
            compute[device] += self._seconds[item][device]
            size[device] += self._size[item]
        self._transfers(range(len(self._flows)), at, into, out, 1.0)
        return compute, into, out, size

    def _moves(self, at: list[int]) -> dict[int, int]:
        """Items with their new devices; empty: nothing would change."""
        rng = self._rng
        item, kind = rng.randrange(self._count), rng.random()
        if kind < 0.35 and self._around[item]:
            device = at[rng.choice(self._around[item])]
            return {item: device} if device != at[item] else {}
        if kind < 0.5:
            device = rng.randrange(self._devices)
            return {item: device} if device != at[item] else {}
        if kind < 0.75:
            other = rng.randrange(self._count)
            return {item: at[other], other: at[item]} if at[other] != at[item] else {}
        device = rng.randrange(self._devices)
        if device == at[item]:
            return {}
        blob, edge, size = {item: device}, [item], rng.randrange(2, _BLOB + 1)
        while edge and len(blob) < size:
            for near in self._around[edge.pop(rng.randrange(len(edge)))]:
                if at[near] == at[item] and near not in blob and len(blob) < size:
                    blob[near] = device
                    edge.append(near)
        return blob

    def _fits(self, moves: dict[int, int], at: list[int], size: list[float]) -> bool:
        grows: dict[int, float] = {}
        for item, device in moves.items():
            if math.isinf(self._seconds[item][device]):
                return False
            grows[device] = grows.get(device, 0.0) + self._size[item]
            grows[at[item]] = grows.get(at[item], 0.0) - self._size[item]
        return all(size[device] + more <= self._room[device] for device, more in grows.items() if more > 0)

    def _move(
        self, moves: dict[int, int], at: list[int], compute: list[float], into: list[float], out: list[float]
    ) -> None:
        flows = {f for item in moves for f in self._touching[item]}
        self._transfers(flows, at, into, out, -1.0)
        for item, device in moves.items():
            compute[at[item]] -= self._seconds[item][at[item]]
            compute[device] += self._seconds[item][device]
            at[item] = device
        self._transfers(flows, at, into, out, 1.0)

    def _transfers(self, flows: Iterable[int], at: list[int], into: list[float], out: list[float], sign: float) -> None:
        """Add or take away what flows cost the devices at their ends."""
        pays = self._pays
        for f in flows:
            source, targets, cost = self._flows[f]
            home = at[source]
            readers = {at[target] for target in targets}
            readers.discard(home)
            if readers:
                if pays[home]:
                    out[home] += sign * cost
                for device in readers:
                    if pays[device]:
                        into[device] += sign * cost
