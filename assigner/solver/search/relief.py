"""Where memory binds: plans whose workers divide the optimizer state of the stages that they share.

The search places stages whose workers all have the whole state of what they hold. Where that leaves too little room for
a micro-batch's activations, its best plans rematerialise, or are none. Those are looked at once more, and so is the
whole model on every worker: with the state divided (`stage_remat.divided`) they may rematerialise less, at the price
of handing out what each worker has updated. A plan that is faster so takes the place of the best one.

What the search proves is about plans that divide nothing. Of those that do, what is proven of all plans is the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.schedule.replication import taken
from assigner.solver.baselines.data_parallel import equal_shares, shares_by_speed
from assigner.solver.baselines.prices import BaselinePrices
from assigner.solver.methods.candidate import PROVEN, Proposal
from assigner.solver.problem.stage_remat import divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.problem.problem import Problem
    from assigner.solver.search.search import Search

DIVIDED = "optimizer state divided where memory binds"
"""How such a plan was found."""


def relieved(search: Search, best: Proposal | None) -> Proposal | None:
    """A faster plan than the best without, with optimizer state divided; None: there is none.

    Once the time of the search is over, none is looked at any more.
    """
    problem = search.problem
    if problem.most_replicas < 2:
        return None
    below = float("inf") if best is None else best.value * (1 - PROVEN)
    found: Proposal | None = None
    for plan in _candidates(search, best):
        if problem.clock.over:
            break
        if _busiest_s(problem, plan) >= below or not problem.options.searches(plan):
            continue
        other = divided(problem, plan)
        if other is not None and (seconds := problem.step_s(other)) < below:
            found, below = Proposal(other, seconds, DIVIDED), seconds
    return found


def _busiest_s(problem: Problem, plan: Plan) -> float:
    """What one worker of a plan computes in a step, recomputing left out: no step of it is shorter."""
    table = problem.prices(plan.micro_batches)
    found = dict.fromkeys(plan.workers, 0.0)
    for n, stage in enumerate(plan.stages):
        at = [problem.position[name] for name in stage.partitions]
        for worker in stage.workers:
            row = table.measured(worker)
            once = sum(price.forward_s + price.backward_s for i in at if (price := row[i]) is not None)
            found[worker] += len(taken(plan, n, worker)) * once
    return max(found.values())


def _candidates(search: Search, best: Proposal | None) -> Iterator[Plan]:
    """The best plans with shared stages, and the whole model on every worker, whether it fits or not."""
    for proposal in (best, *(candidate.best for candidate in search.candidates)):
        if proposal is not None and proposal.plan.is_replicated:
            yield proposal.plan
    pricing = BaselinePrices(search.problem)
    for make in (equal_shares, shares_by_speed):
        for candidate in make(pricing):
            if candidate.is_replicated and search.problem.keeps_hints(candidate):
                yield candidate
