"""Columns that no better plan can use: bounds that need no solver.

A pipeline through column j takes at least

    into[first, k] + f[j] + b[j] + out[last + 1, k]           the sums at their least over all chains (counts left out)
    + (M - 1) (max(f[j], rest.F[j]) + max(b[j], rest.B[j]))   the slowest server: j, or one of those that do the rest

The rest is what lies outside j, for the workers but one of k. With any weights w[k] >= 0, loads of at most m give
m sum(w) >= sum over partitions of min over k of w[k] f[i, k]; with w[k] the speed of k this is the perfect split.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.cost import PartitionCost
    from assigner.solver.instance import Instance
    from assigner.solver.segments import Column


def chain_bounds(instance: Instance) -> dict[Column, float]:
    """For each column, seconds that no pipeline with it can beat; inf: it is in no pipeline."""
    own = {key: instance.spine_s(column) for key, column in instance.columns.items()}
    into, out = _sums(instance, {key: sum(seconds) for key, seconds in own.items()})
    spine = instance.problem.spine
    rest_f = _Rest(instance, [_on(row, spine.forward, "forward_s") for row in instance.prices])
    rest_b = _Rest(instance, [_on(row, spine.backward, "backward_s") for row in instance.prices])
    bounds, more = {}, instance.micro_batches - 1
    for key, column in instance.columns.items():
        first, last, group = key
        forward, backward = own[key]
        slowest = max(forward, rest_f.least(*key)) + max(backward, rest_b.least(*key))
        bound = into[first][group] + forward + backward + out[last + 1][group]
        bound += more * slowest if more else (0.0 if slowest < math.inf else math.inf)
        if first == 0 and instance.problem.exact:
            bound += column.update_s
        bounds[column] = bound
    return bounds


def _on(prices: Sequence[PartitionCost | None], spine: Sequence[bool], name: str) -> list[float | None]:
    """Seconds of each position, 0 off the spine; None: not there."""
    return [None if price is None else getattr(price, name) * on for price, on in zip(prices, spine, strict=True)]


def _sums(instance: Instance, own: dict[tuple[int, int, int], float]) -> tuple[list[list[float]], list[list[float]]]:
    """Least seconds in front of a stage that starts at i on k, and behind one that ends at i - 1 on k: [i][k]."""
    n, groups = len(instance.problem.order), len(instance.groups)
    into = [[math.inf] * groups for _ in range(n + 1)]
    out = [[math.inf] * groups for _ in range(n + 1)]
    into[0], out[n] = [0.0] * groups, [0.0] * groups
    hops: list[list[tuple[int, int, float]]] = [[] for _ in range(n + 1)]
    for (i, left, right), hop in instance.hops.items():
        hops[i].append((left, right, hop.forward_s + hop.backward_s))
    starting: list[list[tuple[int, int, float]]] = [[] for _ in range(n + 1)]
    ending: list[list[tuple[int, int, float]]] = [[] for _ in range(n + 1)]
    for (first, last, group), seconds in own.items():
        starting[first].append((last + 1, group, seconds))
        ending[last + 1].append((first, group, seconds))
    for i in range(1, n):
        _step(ending[i], into, into[i], [(right, left, seconds) for left, right, seconds in hops[i]])
    for i in range(n - 1, 0, -1):
        _step(starting[i], out, out[i], hops[i])
    return into, out


def _step(
    stages: Sequence[tuple[int, int, float]],
    known: Sequence[Sequence[float]],
    at: list[float],
    hops: Sequence[tuple[int, int, float]],
) -> None:
    """Fill `at`, by the group on this side of a boundary, from the stages on its other side.

    Args:
        stages: (their other end, group, seconds).
        known: Sums at the other ends.
        at: To be filled.
        hops: (group on this side, group on the other side, seconds).
    """
    done = [math.inf] * len(at)
    for end, group, seconds in stages:
        done[group] = min(done[group], known[end][group] + seconds)
    for here, there, seconds in hops:
        at[here] = min(at[here], done[there] + seconds)


class _Rest:
    """The perfect split of everything outside a segment among all workers but one.

    Args:
        instance: Groups and their counts.
        seconds: Per group and position; None: not there.
    """

    def __init__(self, instance: Instance, seconds: Sequence[Sequence[float | None]]) -> None:
        totals = [sum(value for value in row if value is not None) for row in seconds]
        weights = [1 / total if total > 0 else 0.0 for total in totals]
        counts = [len(group) for group in instance.groups]
        self._weight, self._work, self._stuck = [], [], []
        for without in range(len(counts)):
            left = [count - (group == without) for group, count in enumerate(counts)]
            self._weight.append(sum(count * weight for count, weight in zip(left, weights, strict=True)))
            work, stuck = [], []
            for i in range(len(seconds[0])):
                found = [
                    weights[group] * value
                    for group, count in enumerate(left)
                    if count and (value := seconds[group][i]) is not None
                ]
                work.append(min(found, default=0.0))
                stuck.append(not found)
            self._work.append(list(itertools.accumulate(work, initial=0.0)))
            self._stuck.append(list(itertools.accumulate(stuck, initial=0)))

    def least(self, first: int, last: int, without: int) -> float:
        """Least possible slowest server among the other workers, in seconds; inf: they cannot do the rest."""
        stuck, work = self._stuck[without], self._work[without]
        if stuck[-1] - stuck[last + 1] + stuck[first]:
            return math.inf
        rest = work[-1] - work[last + 1] + work[first]
        return max(0.0, rest) / self._weight[without] if self._weight[without] else 0.0
