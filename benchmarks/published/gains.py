"""Faster plans on the nodes of a run: other cuts for the same replicas, and what the solver finds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from pricing import Groups, Price
from sailor import Node, Run

from assigner.formats.plan import Plan
from assigner.schedule.simulate import priced
from assigner.solver import SolveOptions, solve

if TYPE_CHECKING:
    from sailor import Measured


@dataclass(frozen=True)
class Solved:
    """A plan of the solver.

    Args:
        plan: Priced for the order of its stages.
        nodes: Those of each stage.
    """

    plan: Plan
    nodes: tuple[tuple[Node, ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        assert self.plan.predicted is not None
        return self.plan.predicted.step_s


@dataclass(frozen=True)
class Gain:
    """One run and the plans on its nodes that are faster by the same prices.

    Args:
        run: What the authors measured.
        price: Of their plan.
        cuts: The fastest of all cuts on the same replicas.
        cut_price: Of these.
        solved: The faster of the solver's plans with and without replicas.
    """

    run: Run
    price: Price
    cuts: tuple[int, ...]
    cut_price: Price
    solved: Solved


def gain(measured: Measured, run: Run, *, reserve: float, limit_s: float) -> Gain:
    """Look for faster plans.

    Args:
        measured: The authors' profile.
        run: Whose nodes are used.
        reserve: Bytes of each GPU that its tensors cannot have.
        limit_s: Of each call of the solver.
    """
    sizes = {"micro_batch_size": run.micro_batch_size, "micro_batches": run.micro_batches}
    groups = Groups(measured, run.replicas, **sizes, reserve=reserve)
    cuts, cut_price = min(((cuts, groups.price(cuts)) for cuts in _all_cuts(run, measured.layers)), key=_rank)
    nodes = tuple(sorted(itertools.chain(*run.replicas), key=lambda node: (node.gpu, node.gpus)))
    solved = _solved(
        measured, nodes, run.micro_batch_size, run.micro_batches * run.chains, reserve=reserve, limit_s=limit_s
    )
    return Gain(run, groups.price(run.cuts), cuts, cut_price, solved)


def _rank(found: tuple[tuple[int, ...], Price]) -> tuple[bool, float]:
    """What fits first, then what is faster."""
    return found[1].spare_bytes < 0, found[1].step_s


def _all_cuts(run: Run, layers: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, layers), len(run.cuts) - 1)
    return [tuple(high - low for low, high in itertools.pairwise((0, *inner, layers))) for inner in ends]


@cache
def _solved(
    measured: Measured, nodes: tuple[Node, ...], size: int, micro_batches: int, *, reserve: float, limit_s: float
) -> Solved:
    """The best plan under prices that hold for any order of the nodes, priced anew for the order that it has.

    Without replicas the solver is asked once more, for that order.
    """
    asked = {"schedule": "1f1b", "remat": "never", "micro_batches": micro_batches, "time_limit": limit_s}
    batch = size * micro_batches
    profile = measured.profile([[node] for node in nodes], batch_size=batch, reserve=reserve, ordered=False)
    found = []
    for most in (1, len(nodes)):
        plan = solve(profile, SolveOptions(**asked, max_replicas=most)).plan
        groups = tuple(tuple(nodes[profile.worker[name].rank] for name in stage.workers) for stage in plan.stages)
        in_order = measured.profile(groups, batch_size=batch, reserve=reserve)
        names = dict(zip((name for stage in plan.stages for name in stage.workers), in_order.worker, strict=True))
        found.append(Solved(priced(_renamed(plan, names), in_order), groups))
        if most == 1:
            again = solve(in_order, SolveOptions(**asked, max_replicas=most, order=tuple(in_order.worker))).plan
            found.append(Solved(again, tuple(groups[in_order.worker[name].rank] for name in again.workers)))
    return min(found, key=lambda each: each.step_s)


def _renamed(plan: Plan, names: dict[str, str]) -> Plan:
    """The plan on workers of other names."""
    stages = (
        replace(
            stage,
            sole_worker=None if stage.sole_worker is None else names[stage.sole_worker],
            replicas=tuple(replace(each, worker=names[each.worker]) for each in stage.replicas),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages), predicted=None, solver=None, baselines=(), candidates=(), what_if=())
