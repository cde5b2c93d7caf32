"""Placements that need no search, to compare with: everything on one device, equal shares, greedy shares, one order.

None of them looks at memory before it is done: what does not fit is infeasible.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from load import Stage, evaluate
from load.downsets import along, some_orders
from load.items import contract
from load.lattice import Lattice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from load import LoadProblem


def baselines(problem: LoadProblem) -> dict[str, float]:
    """The largest load of each, on devices of the first class only; inf: it does not run."""
    like = replace(
        problem,
        devices=problem.devices[:1],
        nodes=tuple(
            replace(node, options=tuple(replace(o, seconds=o.seconds[:1]) for o in node.options))
            for node in problem.nodes
        ),
    )
    return {
        "one device": _least(like, [list(range(len(like.nodes)))]),
        "equal": _least(like, _equal(like)),
        "greedy": _least(like, _greedy(like)),
        "one order": _one_order(like),
    }


def _least(problem: LoadProblem, shares: list[list[int]]) -> float:
    """The largest load with the first options everywhere or, where that breaks a rule, the last ones; else inf."""
    for choice in (0, -1):
        stages = tuple(
            Stage(0, nodes, _chosen(problem, nodes, choice)) for share in shares if (nodes := tuple(sorted(share)))
        )
        value = evaluate(problem, stages).value
        if math.isfinite(value):
            return value
    return math.inf


def _chosen(problem: LoadProblem, nodes: tuple[int, ...], choice: int) -> tuple[int, ...]:
    return tuple(range(len(problem.nodes[node].options))[choice] for node in nodes)


def _in_order(problem: LoadProblem) -> Iterator[tuple[list[int], float]]:
    """Nodes that cannot be parted, in topological order, with their time."""
    for members in contract(problem).members:
        yield list(members), sum(problem.nodes[node].options[0].seconds[0] for node in members)


def _equal(problem: LoadProblem) -> list[list[int]]:
    groups = [nodes for nodes, _ in _in_order(problem)]
    k = problem.devices[0].count
    borders = [round(part * len(groups) / k) for part in range(k + 1)]
    return [[node for group in groups[a:b] for node in group] for a, b in itertools.pairwise(borders)]


def _greedy(problem: LoadProblem) -> list[list[int]]:
    """Fill each device until it has its share of the time."""
    groups, k = list(_in_order(problem)), problem.devices[0].count
    share = sum(seconds for _, seconds in groups) / k
    shares: list[list[int]] = [[] for _ in range(k)]
    done, d = 0.0, 0
    for nodes, seconds in groups:
        if done + seconds / 2 > share * (d + 1) and d < k - 1:
            d += 1
        shares[d] += nodes
        done += seconds
    return shares


def _one_order(problem: LoadProblem) -> float:
    """The best cuts of one topological order, as PipeDream's planner would have them of a chain."""
    items = contract(problem)
    lattice = Lattice(items, along(some_orders(items, count=1, seed=0)))
    found = lattice.search(limit=math.inf, deadline=time.monotonic() + 60, gap=1e-4)
    return evaluate(problem, found.stages).value if found.stages else math.inf
