"""Which partitions of one stage to rematerialise: a small knapsack, solved exactly.

A stage that keeps `in_flight` micro-batches fits if

    in_flight * (sum of stored activations) + (largest rematerialised activation) <= room

and rematerialising a partition costs the time of its recompute. Everything else about the step time is untouched,
so the subset with the least added time is the best whatever the other stages do.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.options import RematRule


FEW = 3
"""Up to so many different activation sizes, counts per size are enumerated; more are left to branch and bound."""


def least_remat(
    activations: Sequence[float],
    recomputes: Sequence[float],
    *,
    in_flight: int,
    room: float,
    rules: Sequence[RematRule | None] | None = None,
) -> tuple[int, ...] | None:
    """The positions to rematerialise: least sum of `recomputes`, then found first; None: nothing fits.

    The largest rematerialised activation is enumerated: for each value `top`, only partitions up to it take part, and
    what is left is a minimum knapsack.

    Args:
        activations: Bytes that each partition keeps per micro-batch.
        recomputes: Seconds that rematerialising each partition adds to a micro-batch.
        in_flight: Micro-batches kept at once.
        room: Bytes for activations.
        rules: Per position "never" or "always" where there is no choice; left out: all are free.
    """
    given = rules or [None] * len(activations)
    forced = [i for i, rule in enumerate(given) if rule == "always"]
    base = max((activations[i] for i in forced), default=0.0)
    excess = in_flight * (sum(activations) - sum(activations[i] for i in forced)) - room
    if excess + base <= 0:
        return tuple(forced)
    free = [i for i, size in enumerate(activations) if size > 0 and given[i] is None]
    ranked = sorted(free, key=lambda i: (recomputes[i] / activations[i], i))
    best = _Best(float("inf"), None)
    sizes = sorted({activations[i] for i in ranked}, reverse=True)
    for n, top in enumerate(sizes):
        items = [i for i in ranked if activations[i] <= top]
        need = (excess + max(top, base)) / in_flight
        if sum(activations[i] for i in items) < need:
            break  # a smaller top loses more activations than it gains room
        if len(sizes) - n <= FEW:
            groups = [[i for i in items if activations[i] == size] for size in sizes[n:]]
            _count(sorted(groups, key=len), sizes_of=activations, recomputes=recomputes, need=need, best=best)
        else:
            _cover(items, activations, recomputes, need, best)
        if top <= base:
            break  # below, only choice is lost
    return None if best.chosen is None else tuple(sorted([*forced, *best.chosen]))


@dataclass(slots=True)
class _Best:
    cost: float
    chosen: list[int] | None


def _count(
    groups: Sequence[list[int]],
    *,
    sizes_of: Sequence[float],
    recomputes: Sequence[float],
    need: float,
    best: _Best,
    taken: tuple[int, ...] = (),
    cost: float = 0.0,
) -> None:
    """Improve `best`: of each group, whose activations are equal, the cheapest few; of the last, what is still missing.

    Args:
        groups: Positions with equal activations, the cheapest first.
        sizes_of: Activations by position.
        recomputes: Seconds by position.
        need: Bytes that the chosen must add up to.
        best: The best so far.
        taken: Chosen from earlier groups.
        cost: Their seconds.
    """
    group, *rest = groups
    size = sizes_of[group[0]]
    if not rest:
        least = max(0, math.ceil(need / size))
        if least > len(group):
            return
        cost += sum(recomputes[i] for i in group[:least])
        if cost < best.cost:
            best.cost, best.chosen = cost, [*taken, *group[:least]]
        return
    for number in range(len(group) + 1):
        if cost >= best.cost:
            return
        _count(
            rest, sizes_of=sizes_of, recomputes=recomputes, need=need - number * size, best=best,
            taken=(*taken, *group[:number]), cost=cost,
        )  # fmt: skip
        if number * size >= need or number == len(group):
            return
        cost += recomputes[group[number]]


def _cover(
    items: Sequence[int], activations: Sequence[float], recomputes: Sequence[float], need: float, best: _Best
) -> None:
    """Improve `best` with the cheapest `items` whose activations add up to `need`, by depth-first branch and bound.

    `items` are ordered by seconds per byte, so filling up in that order (the last one in part) is a lower bound. Of
    equal activations the cheaper is taken first: once one is left out, so are its equals that follow.
    """
    chosen: list[int] = []
    size_up_to = list(itertools.accumulate((activations[i] for i in items), initial=0.0))
    cost_up_to = list(itertools.accumulate((recomputes[i] for i in items), initial=0.0))

    def bound(at: int, missing: float) -> float:
        filled = bisect_left(size_up_to, size_up_to[at] + missing, lo=at)
        if filled > len(items):
            return float("inf")
        i = items[filled - 1]
        over = (size_up_to[filled] - size_up_to[at] - missing) / activations[i]
        return cost_up_to[filled] - cost_up_to[at] - over * recomputes[i]

    def descend(at: int, missing: float, cost: float, left_out: frozenset[float]) -> None:
        if missing <= 0:
            if cost < best.cost:
                best.cost, best.chosen = cost, list(chosen)
            return
        if at == len(items) or cost + bound(at, missing) >= best.cost * (1 - 1e-12):
            return
        i = items[at]
        if activations[i] not in left_out:
            chosen.append(i)
            descend(at + 1, missing - activations[i], cost + recomputes[i], left_out)
            chosen.pop()
        descend(at + 1, missing, cost, left_out | {activations[i]})

    descend(0, need, 0.0, frozenset())
