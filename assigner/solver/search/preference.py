"""Among plans that the gap asked for does not tell apart: less memory first, then what is least unlike an equal split.

    the best plan of each candidate ── with fewer micro-batches in flight ── with like workers in the profile's order

A plan that is slower than the best one found is taken only once it is proven to be within the gap, too: then the bound
is raised as far as that takes, in at most as much time again as the search took.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.schedule.orders import warm_up
from assigner.schedule.simulate import worker_memory
from assigner.solver.baselines import TITLES
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING
from assigner.solver.methods.candidate import BASELINE, PROVEN, Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.terms import Schedule
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.problem.problem import Problem
    from assigner.solver.search.search import Search

SIMPLER = "choice among plans within the gap"
"""How such a plan was found."""

ALSO_UNDER: tuple[Schedule, ...] = ("1f1b", "interleaved")
"""What a plan under GPipe can run under, too."""


def preferred(search: Search, best: Proposal, simple: Sequence[FoundBaseline]) -> Proposal:
    """The plan to answer with, in place of the fastest one found; the search is asked for more of a proof.

    No baseline is faster than it unless one is faster than `best`. The equal split is what people compare with.
    """
    problem = search.problem
    most = best.value * (1 + max(search.state.gap, ROUNDING))
    if search.state.sharing is not None:  # that workers may share stages makes no plan slower
        alone = min(each.best_value for each in search.candidates if not each.shares)
        most = min(most, max(alone, best.value) * (1 + ROUNDING))
    quickest = min((each.step_s for each in simple), default=math.inf)  # of what the answer's table shows
    most = min(most, max(quickest, best.value) * (1 + ROUNDING))
    equal = next(
        (each.plan.placement for each in simple if each.title == TITLES["equal"] and each.plan is not None), {}
    )
    bests = [each.best for each in search.candidates if each.best is not None and each.best_value <= most]
    lighter = _lightest(problem, [best, *bests], most)
    for plan in dict.fromkeys(
        each for light in (lighter, best) for each in (_near(problem, light, equal, most), light)
    ):
        if plan.value <= best.value * (1 + ROUNDING) or search.allows(plan.value):
            return plan
    return best


def simpler(search: Search, simple: Sequence[FoundBaseline]) -> Proposal | None:
    """A baseline that is faster than all that was found, under a schedule that was asked for.

    It can be: local search over several stages a worker may miss it, and a limit may come early. One under GPipe may be
    an answer under another schedule, too. Once the time is over, none is priced behind one that is an answer.
    """
    options, state, found = search.state.options, search.state, list[Proposal]()
    for each in sorted(simple, key=lambda each: each.step_s):
        if each.plan is None or each.step_s >= state.best_value * (1 - PROVEN) or (found and search.problem.clock.over):
            break  # so it is of all that follow
        kind: Schedule = "interleaved" if each.plan.is_looped else each.plan.schedule
        others = ALSO_UNDER if kind == "gpipe" else ()
        for schedule in (kind, *others):
            plan = replace(each.plan, schedule=schedule, objective=options.objective)
            value = search.problem.value_of(plan) if options.searches(plan) else math.inf
            if math.isfinite(value):
                found.append(Proposal(plan, value, f"{BASELINE}: {each.title}"))
    return min(found, key=lambda proposal: proposal.value, default=None)


def _lightest(problem: Problem, found: Sequence[Proposal], most: float) -> Proposal:
    """Of plans, the first of which is the best, and their shallower variants the one that needs least memory."""
    best, least = found[0], tuning.LIGHTER * _bytes(problem, found[0].plan)
    variants = (itertools.chain([each.plan], _shallower(problem, each.plan)) for each in dict.fromkeys(found))
    for plan in itertools.chain.from_iterable(variants):  # each made when its turn comes: there may be many
        if problem.clock.over:
            break
        held = _bytes(problem, plan)
        if held < least:
            value = problem.step_s(plan)
            if value <= most:
                best, least = Proposal(plan, value, SIMPLER), held
    return best


def _shallower(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan under 1F1B with fewer micro-batches in flight."""
    if problem.options.schedule not in ("auto", "1f1b") or plan.is_looped:
        return
    depths = [warm_up(plan, n) for n in range(len(plan.stages))]
    usual = [min(plan.micro_batches, sum(len(each.workers) for each in plan.stages[n:])) for n in range(len(depths))]
    for most in range(1, max(depths)):
        capped = [min(depth, max(most, least)) for depth, least in zip(depths, usual, strict=True)]
        stages = (
            replace(stage, in_flight=None if depth == least else depth)
            for stage, depth, least in zip(plan.stages, capped, usual, strict=True)
        )
        yield replace(plan, schedule="1f1b", stages=tuple(stages))


def _near(problem: Problem, light: Proposal, equal: Mapping[str, str], most: float) -> Proposal:
    """The plan with its workers of a kind in the profile's order, if it is fast enough and nearer to `equal` so."""
    plan, options = light.plan, problem.options
    if options.order or len(plan.stages) != len(plan.workers):
        return light
    kind = {worker.name: worker.alike for worker in problem.workers}
    free, stages = dict(kind), []
    for stage in plan.stages:
        name = next(name for name in free if kind[name] == kind[stage.worker])
        del free[name]
        stages.append(replace(stage, sole_worker=name, threads=problem.profile.worker[name].threads))
    moved = replace(plan, stages=tuple(stages))
    if _unlike(moved, equal) >= _unlike(plan, equal):
        return light
    value = problem.step_s(moved) if problem.keeps_hints(moved) else math.inf
    return Proposal(moved, value, SIMPLER) if value <= most else light


def _unlike(plan: Plan, equal: Mapping[str, str]) -> int:
    """How many partitions are on another worker than there."""
    return sum(equal.get(name) != worker for name, worker in plan.placement.items())


def _bytes(problem: Problem, plan: Plan) -> float:
    """What all workers hold at their peaks."""
    return sum(worker_memory(problem.cost, plan, worker).total for worker in plan.workers)
