"""From a finished search to the answer: the plan with its price, its proof, the baselines and what was left behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import AssignerError, InfeasibleError, LimitError
from assigner.objective import objective_value
from assigner.plan import Candidate, SolverReport
from assigner.simulate import overfull, predict
from assigner.solver.answer import FrontierPoint, Solution
from assigner.solver.baselines import find_baselines
from assigner.solver.budget import Budget
from assigner.solver.contest import PROVEN, Proposal
from assigner.solver.hints import resolve
from assigner.solver.preference import preferred
from assigner.solver.search import Search
from assigner.solver.why import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.plan import Plan, Prediction, Schedule
    from assigner.profile import Profile
    from assigner.solver.answer import Progress
    from assigner.solver.baselines import Simple
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
    simple = find_baselines(search.problem)
    best, bound = search.contest.best, search.bound
    if options.objective == "step":
        better = simpler(search, simple)
        if better is not None:
            best = better
        if best is not None:
            best = _adopted(search, preferred(search, best, simple))
    if best is None:
        raise _no_plan(search, profile, options)
    return _solution(search, best, search.bound if best is search.contest.best else bound, options, simple)


def _adopted(search: Search, chosen: Proposal) -> Proposal:
    """A plan that the search takes as its own, if it belongs to one of its settings."""
    for setting in search.settings:
        if (setting.schedule, setting.micro_batches) == (chosen.plan.schedule, chosen.plan.micro_batches):
            search.contest.best = setting.best = chosen
            break
    return chosen


def simpler(search: Search, simple: Sequence[Simple]) -> Proposal | None:
    """A baseline that is faster than all that was found, under a schedule that was asked for.

    It can be: local search over several stages a worker may miss it, and a limit may come early.
    """
    options, found = search.contest.options, []
    for each in simple:
        if each.plan is not None and each.step_s < search.contest.best_value * (1 - PROVEN):
            kind: Schedule = "gpipe" if len(each.plan.stages) == len(each.plan.workers) else "interleaved"
            plan = replace(each.plan, schedule=kind)
            if options.searches(plan):
                found.append(Proposal(plan, each.step_s))
    return min(found, key=lambda proposal: proposal.value, default=None)


def _cheapest(profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None) -> Solution:
    budget = Budget(*resolve(profile, options), progress)
    simple = find_baselines(budget.problem)
    frontier = budget.run(
        [(each.plan, each.step_s) for each in simple if each.plan and len(each.plan.stages) == len(each.plan.workers)]
    )
    best = budget.cheapest(frontier)
    if best is None:
        raise _no_offer(budget, frontier, profile, options)
    proposal = Proposal(replace(best.plan, objective="cost"), best.money)
    solution = _solution(budget.search, proposal, budget.bound, options, simple)
    points = tuple(FrontierPoint(each.money, each.step_s, each.plan.workers, each is best) for each in frontier)
    return replace(solution, plan=replace(solution.plan, candidates=()), frontier=points)


def _solution(
    search: Search, best: Proposal, bound: float, options: SolveOptions, simple: Sequence[Simple]
) -> Solution:
    """The plan with its prediction, report and baselines.

    Args:
        search: Where it was found.
        best: The plan, and what the search says of it.
        bound: No plan has a lower value.
        options: What was asked for, in the user's own words.
        simple: The baselines.
    """
    cost, plan, value = search.problem.cost, best.plan, best.value
    prediction = predict(plan, cost.profile, cost)
    unit = plan.micro_batches if plan.objective == "throughput" else 1  # the search compares whole batches
    _check(plan, value / unit, objective_value(plan, plan.objective, cost, step_s=prediction.step_s))
    _check_memory(prediction)
    report = _report(search.contest, options, value / unit, min(bound, value) / unit)
    return Solution(
        replace(
            plan, predicted=prediction, solver=report, candidates=_candidates(search, best, bound),
            baselines=tuple(each.row for each in simple),
        )
    )  # fmt: skip


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


def _candidates(search: Search, best: Proposal, bound: float) -> tuple[Candidate, ...]:
    """All settings; where the plan is a baseline's, it stands for the setting that it would belong to."""
    alike: dict[tuple[str, int], list[Setting]] = {}
    for setting in search.settings:  # along each order of a graph there is one
        alike.setdefault((setting.schedule, setting.micro_batches), []).append(setting)
    plan, found = best.plan, [_candidate(search, settings, best) for settings in alike.values()]
    if best is search.contest.best or plan.objective != "step":
        return tuple(found)
    chosen = Candidate(
        plan.schedule, plan.micro_batches, plan.micro_batch_size, best.value, min(bound, best.value), "chosen"
    )
    others = [each for each in found if (each.schedule, each.micro_batches) != (plan.schedule, plan.micro_batches)]
    return (*others, chosen)


def _candidate(search: Search, settings: Sequence[Setting], best: Proposal) -> Candidate:
    """What came of the settings of one schedule and micro-batch count."""
    gap, first, bound = search.contest.options.gap, settings[0], min(setting.bound for setting in settings)
    value = min(setting.best_value for setting in settings)
    if any(setting.best is best for setting in settings):
        status = "chosen"
    elif math.isinf(bound):
        status = "infeasible: nothing fits"
    elif bound >= best.value * (1 - PROVEN):
        status = "proven worse"
    elif value < best.value * (1 - PROVEN):
        status = "needs more memory"
    elif all(setting.decided for setting in settings) or bound >= best.value * (1 - gap - PROVEN):
        status = f"gains {fmt.percent(max(0.0, 1 - bound / best.value))} at most"
    else:
        status = "not decided"
    return Candidate(
        first.schedule, first.micro_batches, first.size, None if math.isinf(value) else value,
        None if math.isinf(bound) else bound, status,
    )  # fmt: skip


def _no_offer(
    budget: Budget, frontier: Sequence[Offer], profile: Profile, options: SolveOptions
) -> InfeasibleError | LimitError:
    """Why no plan meets the step time asked for."""
    contest = budget.search.contest
    if budget.fastest_bound_s > (options.max_step_s or math.inf) or math.isinf(budget.fastest_bound_s):
        return explain(profile, options, left_s=contest.left_s)
    if not frontier:
        least = budget.fastest_bound_s
        told = f", and any takes {fmt.seconds(least)} a step or more" if 0 < least < math.inf else ""
        return LimitError(f"no plan was found in {fmt.seconds(contest.elapsed_s)}{told}", hint="a longer --time-limit")
    fastest = frontier[-1]
    return LimitError(
        f"no plan of {options.max_step_s:g} s a step or less was found: the fastest takes"
        f" {fmt.seconds(fastest.step_s)}, and {fmt.seconds(budget.fastest_bound_s)} is not ruled out",
        hint=f"--max-step {fastest.step_s:.4g} fits, at {1000 * fastest.money:.4g} per 1000 samples",
    )


def _no_plan(search: Search, profile: Profile, options: SolveOptions) -> InfeasibleError | LimitError:
    contest = search.contest
    if search.decided:
        return explain(profile, options, left_s=contest.left_s)
    (schedule, count), *more = dict.fromkeys(
        (setting.schedule, setting.micro_batches) for setting in search.settings if not setting.decided
    )
    open_ = f"{schedule} with {fmt.plural(count, 'micro-batch')}"
    return LimitError(
        f"no plan was found in {fmt.seconds(contest.elapsed_s)}, and it is not proven that there is none: {open_}"
        + (f" and {fmt.plural(len(more), 'candidate')} more are open" if more else " is open")
        + (f"; any plan takes {fmt.seconds(search.bound)} or more" if 0 < search.bound < math.inf else ""),
        hint=f"{'a longer --time-limit' if contest.left_s <= 0 else 'more memory'}, or a fixed --micro-batches",
    )
