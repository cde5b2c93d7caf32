"""Columns that no better plan can use: bounds that need no solver.

A pipeline through column j takes at least

    into[first, k] + f[j] + b[j] + out[last + 1, k]           the sums at their least over all chains (counts left out)
    + (M - 1) (max(f[j], rest.F[j]) + max(b[j], rest.B[j]))   the slowest server: j, or one of those that do the rest

The rest is what lies outside j, for the workers but one of k: the perfect split (perfect_split.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.perfect_split import least_work, perfect_split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.prices import PriceTable, StageOption

    Floats = NDArray[np.float64]


def chain_bounds(instance: PriceTable) -> dict[StageOption, float]:
    """For each column, seconds that no pipeline with it can beat; inf: it is in no pipeline."""
    own = {key: instance.spine_s(column) for key, column in instance.options.items()}
    into, out = _sums(instance, {key: sum(seconds) for key, seconds in own.items()})
    spine = instance.problem.spine
    rest_f = _OthersSplit(instance, _on(instance, spine.forward, "forward_s"))
    rest_b = _OthersSplit(instance, _on(instance, spine.backward, "backward_s"))
    bounds, more = {}, instance.micro_batches - 1
    for key, column in instance.options.items():
        first, last, group = key
        forward, backward = own[key]
        slowest = max(forward, rest_f.least(*key)) + max(backward, rest_b.least(*key))
        bound = into[first][group] + forward + backward + out[last + 1][group]
        bound += more * slowest if more else (0.0 if slowest < math.inf else math.inf)
        if first == 0 and instance.problem.exact:
            bound += column.update_s
        bounds[column] = bound
    return bounds


def _on(instance: PriceTable, spine: Sequence[bool], name: str) -> Floats:
    """Seconds [group, position], 0 off the spine; inf: not there."""
    rows = [[math.inf if price is None else getattr(price, name) for price in row] for row in instance.rows]
    return np.where(np.isfinite(rows), np.where(spine, rows, 0.0), np.inf)


def _sums(instance: PriceTable, own: dict[tuple[int, int, int], float]) -> tuple[list[list[float]], list[list[float]]]:
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


class _OthersSplit:
    """The perfect split of everything outside a segment among all workers but one.

    Args:
        instance: Groups and their counts.
        seconds: [group, position]; inf: not there.
    """

    def __init__(self, instance: PriceTable, seconds: Floats) -> None:
        weights, _ = perfect_split(seconds)
        counts = np.array([len(group) for group in instance.groups])
        self._weight, self._work, self._stuck = [], [], []
        for without in range(len(counts)):
            left = counts - (np.arange(len(counts)) == without)
            least = least_work(np.where(left[:, None] > 0, seconds, np.inf), weights)
            some = np.isfinite(least)
            self._weight.append(float(left @ weights))
            self._work.append([0.0, *np.cumsum(np.where(some, least, 0.0)).tolist()])
            self._stuck.append([0, *np.cumsum(~some).tolist()])

    def least(self, first: int, last: int, without: int) -> float:
        """Least possible slowest server among the other workers, in seconds; inf: they cannot do the rest."""
        stuck, work = self._stuck[without], self._work[without]
        if stuck[-1] - stuck[last + 1] + stuck[first]:
            return math.inf
        rest = work[-1] - work[last + 1] + work[first]
        return max(0.0, rest) / self._weight[without] if self._weight[without] else 0.0
