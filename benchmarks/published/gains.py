"""Faster plans on the nodes of a run: other cuts for the same replicas, and what the solver finds without replicas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pricing import Groups, Price
from sailor import Node, Run

from assigner.formats.plan import Plan
from assigner.solver import SolveOptions, solve

if TYPE_CHECKING:
    from sailor import Measured


@dataclass(frozen=True)
class Gain:
    """One run and the plans on its nodes that are faster by the same prices.

    Args:
        run: What the authors measured.
        price: Of their plan.
        cuts: The fastest of all cuts on the same replicas.
        cut_price: Of these.
        solved: The solver's plan on the same nodes, one stage a node and no replicas.
        nodes: Those that hold its stages.
    """

    run: Run
    price: Price
    cuts: tuple[int, ...]
    cut_price: Price
    solved: Plan
    nodes: tuple[Node, ...]


def gain(measured: Measured, run: Run, *, reserve: float, limit_s: float) -> Gain:
    """Look for faster plans.

    Args:
        measured: The authors' profile.
        run: Whose nodes are used.
        reserve: Bytes of each GPU that its tensors cannot have.
        limit_s: Of each of the two calls of the solver.
    """
    sizes = {"micro_batch_size": run.micro_batch_size, "micro_batches": run.micro_batches}
    groups = Groups(measured, run.replicas, **sizes, reserve=reserve)
    cuts, cut_price = min(((cuts, groups.price(cuts)) for cuts in _all_cuts(run, measured.layers)), key=_rank)
    solved, nodes = _solved(measured, run, reserve, limit_s)
    return Gain(run, groups.price(run.cuts), cuts, cut_price, solved, nodes)


def _rank(priced: tuple[tuple[int, ...], Price]) -> tuple[bool, float]:
    """What fits first, then what is faster."""
    return priced[1].spare_bytes < 0, priced[1].step_s


def _all_cuts(run: Run, layers: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, layers), len(run.cuts) - 1)
    return [tuple(high - low for low, high in itertools.pairwise((0, *inner, layers))) for inner in ends]


def _solved(measured: Measured, run: Run, reserve: float, limit_s: float) -> tuple[Plan, tuple[Node, ...]]:
    """Which nodes in which order, with prices that hold for any; then the plan, with those of this order."""
    nodes = [node for stage in run.replicas for node in stage]
    batch = run.micro_batch_size * run.micro_batches * run.chains
    asked = {
        "schedule": "1f1b",
        "remat": "never",
        "micro_batches": batch // run.micro_batch_size,
        "time_limit": limit_s,
    }
    profile = measured.profile([[node] for node in nodes], batch_size=batch, reserve=reserve, ordered=False)
    used = [profile.worker[name].rank for name in solve(profile, SolveOptions(**asked)).plan.workers]
    order = [nodes[rank] for rank in (*used, *(rank for rank in range(len(nodes)) if rank not in used))]
    profile = measured.profile([[node] for node in order], batch_size=batch, reserve=reserve)
    plan = solve(profile, SolveOptions(**asked, order=tuple(profile.worker))).plan
    return plan, tuple(order[profile.worker[name].rank] for name in plan.workers)
