"""From a finished search to the answer: the plan with its price, its proof, the baselines and what was left behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import AssignerError, InfeasibleError, LimitError
from assigner.objective import objective_value
from assigner.plan import SolverReport
from assigner.simulate import overfull, predict
from assigner.solver.answer import Candidate, FrontierPoint, Solution
from assigner.solver.baselines import price_baselines
from assigner.solver.budget import Budget
from assigner.solver.contest import PROVEN
from assigner.solver.hints import resolve
from assigner.solver.limiting import limiting
from assigner.solver.search import Search
from assigner.solver.why import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.plan import Plan, Prediction
    from assigner.profile import Profile
    from assigner.solver.answer import Progress
    from assigner.solver.budget import Offer
    from assigner.solver.contest import Contest
    from assigner.solver.options import SolveOptions
    from assigner.solver.setting import Setting


def answer(profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None = None) -> Solution:
    """Search and report; arguments and errors as `solve`."""
    if options.objective == "cost":
        return _cheapest(profile, options, progress)
    search = Search(*resolve(profile, options), progress)
    search.run()
    if search.contest.best is None:
        raise _no_plan(search, profile, options)
    return _solution(search, search.contest.best.plan, search.contest.best_value, search.bound, search.contest.options)


def _cheapest(profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None) -> Solution:
    budget = Budget(*resolve(profile, options), progress)
    frontier = budget.run()
    best = budget.cheapest(frontier)
    if best is None:
        raise _no_offer(budget, frontier, profile, options)
    plan = replace(best.plan, objective="cost")
    solution = _solution(budget.search, plan, best.money, min(budget.bound, best.money), budget.problem.options)
    points = tuple(FrontierPoint(each.money, each.step_s, each.plan.workers, each is best) for each in frontier)
    return replace(solution, candidates=(), frontier=points)


def _solution(search: Search, plan: Plan, value: float, bound: float, options: SolveOptions) -> Solution:
    """The plan with its prediction, report and baselines.

    Args:
        search: Where it was found.
        plan: The plan.
        value: What the search says of it.
        bound: No plan has a lower value.
        options: What was asked for.
    """
    cost = search.problem.cost
    prediction = predict(plan, cost.profile, cost)
    unit = plan.micro_batches if plan.objective == "throughput" else 1  # the search compares whole batches
    _check(plan, value / unit, objective_value(plan, plan.objective, cost, step_s=prediction.step_s))
    _check_memory(prediction)
    baselines = price_baselines(search.problem)
    report = _report(search.contest, options, value / unit, min(bound, value) / unit)
    return Solution(
        plan=replace(plan, predicted=prediction, solver=report, baselines=baselines),
        candidates=tuple(_candidate(search, setting) for setting in search.settings),
        limiting=limiting(plan, prediction, cost),
    )


def _check(plan: Plan, told: float, found: float) -> None:
    """Raise AssignerError if the search and the simulator disagree: a bug that must not be hidden."""
    if abs(told - found) > PROVEN * found:
        raise AssignerError(
            f"the solver says {told:.9g} for a plan whose {plan.objective} the simulator prices at {found:.9g}",
            hint="this is a bug in the solver: please report it with the profile",
        )


def _check_memory(prediction: Prediction) -> None:
    """Raise AssignerError if the plan does not fit: a bug, too."""
    for worker in overfull(prediction):
        if worker.peak_bytes > worker.capacity_bytes * (1 + 1e-9):  # less is rounding
            raise AssignerError(
                f"the plan needs {worker.peak_bytes:.0f} bytes on {worker.worker}, which has"
                f" {worker.capacity_bytes:.0f}",
                hint="this is a bug in the solver: please report it with the profile",
            )


def _report(contest: Contest, options: SolveOptions, value: float, bound: float) -> SolverReport:
    """What is proven, in the unit of the plan's objective."""
    gap = (value - bound) / value if value else 0.0
    return SolverReport(
        name={"highs": "HiGHS", "cbc": "CBC"}[options.solver],
        version=contest.backend.version(),
        status="optimal" if gap <= options.gap + PROVEN else "feasible",
        objective_s=value,
        bound_s=bound,
        gap=0.0 if gap <= PROVEN else gap,
        seconds=contest.elapsed_s,
        options=options.record() | {"proven_by": sorted(contest.proofs)},
    )


def _candidate(search: Search, setting: Setting) -> Candidate:
    contest = search.contest
    if contest.best is not None and setting.best is contest.best:
        status = "chosen"
    elif math.isinf(setting.bound):
        status = "infeasible: nothing fits"
    elif setting.decided or setting.bound >= contest.best_value * (1 - contest.options.gap - PROVEN):
        status = "proven worse"
    else:
        status = "not decided"
    return Candidate(
        setting.schedule, setting.micro_batches, setting.size,
        None if setting.best is None else setting.best.value, setting.bound, status,
    )  # fmt: skip


def _no_offer(
    budget: Budget, frontier: Sequence[Offer], profile: Profile, options: SolveOptions
) -> InfeasibleError | LimitError:
    """Why no plan meets the step time asked for."""
    contest = budget.search.contest
    if budget.fastest_bound_s > (options.max_step_s or math.inf) or math.isinf(budget.fastest_bound_s):
        return explain(profile, options, left_s=contest.left_s)
    if not frontier:
        return LimitError(f"no plan was found in {contest.elapsed_s:.0f} s", hint="a longer --time-limit")
    fastest = frontier[-1]
    return LimitError(
        f"no plan of {options.max_step_s:g} s a step or less was found: the fastest takes"
        f" {fmt.seconds(fastest.step_s)}",
        hint=f"--max-step {fastest.step_s:.4g} fits, at {1000 * fastest.money:.4g} per 1000 samples",
    )


def _no_plan(search: Search, profile: Profile, options: SolveOptions) -> InfeasibleError | LimitError:
    contest = search.contest
    if search.decided:
        return explain(profile, options, left_s=contest.left_s)
    first, *more = [setting for setting in search.settings if not setting.decided]
    open_ = f"{first.schedule} with {fmt.plural(first.micro_batches, 'micro-batch')}"
    return LimitError(
        f"no plan was found in {contest.elapsed_s:.0f} s, and it is not proven that there is none: {open_}"
        + (f" and {fmt.plural(len(more), 'candidate')} more are open" if more else " is open"),
        hint=f"{'a longer --time-limit' if contest.left_s <= 0 else 'more memory'}, or a fixed --micro-batches",
    )
