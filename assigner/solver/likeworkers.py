"""Workers that a search takes for alike, exchanged: the links of some share wires, and those of others do not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.schedule.objective import compared_value
from assigner.solver import tuning
from assigner.solver.contest import LOCAL, Proposal
from assigner.solver.local_search import local_search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.problem import Problem


def exchanged(problem: Problem, best: Proposal) -> Proposal:
    """The plan with two workers of a kind exchanged as long as that makes it better, at prices with shared wires.

    Args:
        problem: What it is a plan of.
        best: The plan at such prices; one with a stage on several workers, or in an order asked for, stays as it is.
    """
    if best.plan.is_replicated or problem.options.order:
        return best
    left = tuning.EXCHANGED

    def price(plan: Plan) -> float:
        nonlocal left
        left -= 1
        step = problem.step_s(plan)
        if math.isinf(step):
            return step
        return compared_value(plan, plan.objective, problem.cost, step_s=step)

    plan, value = local_search(
        best.plan, best.value, neighbours=lambda plan: _neighbours(problem, plan), price=price,
        may_go_on=lambda: left > 0 and problem.clock.left_s > 0,
    )  # fmt: skip
    return best if plan is best.plan else Proposal(plan, value, LOCAL)


def _neighbours(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with a worker of its own and another of the same kind in each other's place, as far as pins allow."""
    kind = {worker.name: (worker.kind, worker.threads, worker.capacity_bytes) for worker in problem.workers}
    used = [name for name in plan.workers if name in kind]
    for one, other in itertools.product(used, kind):
        if one == other or kind[one] != kind[other] or (other in used and other < one):
            continue
        to = {one: other, other: one}
        stages = tuple(replace(each, sole_worker=to.get(each.worker, each.worker)) for each in plan.stages)
        if all(
            problem.allowed(name, problem.profile.worker[each.worker]) for each in stages for name in each.partitions
        ):
            yield replace(plan, stages=stages)
