"""What a finished search tells: the plan with its price and its proof, the candidates, or why there is no plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import AssignerError, InfeasibleError, LimitError
from assigner.formats.solverreport import UNDIVIDED, Candidate, SolverReport
from assigner.schedule.objective import objective_value
from assigner.schedule.simulate import overfull, prediction_of
from assigner.solver.methods.candidate import INTEGER_PROGRAM, PROVEN, RELAXATION, TOTAL_WORK, Proposal
from assigner.solver.orders.bounds import least_of_all_s
from assigner.solver.problem.answer import Solution
from assigner.solver.why import explain
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction
    from assigner.formats.profile import Profile
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.methods.candidate import CandidateSearch
    from assigner.solver.problem.options import SolveOptions
    from assigner.solver.search.budget import Budget
    from assigner.solver.search.search import Search
    from assigner.solver.why import Excluded


def make_solution(
    search: Search, best: Proposal, bound: float, options: SolveOptions, simple: Sequence[FoundBaseline]
) -> Solution:
    """The plan with its prediction, report and baselines.

    No plan that the search covers is below `bound`, without wires that links share, which only delay; `options` are in
    the user's own words.
    """
    cost, plan = search.problem.cost, best.plan
    prediction = prediction_of(plan, cost)
    _check(plan, best.value, objective_value(plan, plan.objective, cost, step_s=prediction.step_s))
    _check_memory(prediction)
    report = _report(search, best, bound, options)
    return Solution(
        replace(
            plan, predicted=prediction, solver=report, candidates=_candidates(search, best, report.bound_s),
            baselines=tuple(each.row for each in simple),
        )
    )  # fmt: skip


def _report(search: Search, best: Proposal, bound: float, options: SolveOptions) -> SolverReport:
    """What is proven, of which plans and by what, in the unit of the plan's objective; arguments as above.

    Of a plan that the search is not about, as one in an order of its own, what bounds every plan is the bound.
    """
    plan, value = best.plan, best.value
    of_all = min(value, least_of_all_s(search.problem, {each.micro_batches for each in search.candidates}))
    ranges_over_orders = search.any_order and plan.objective == "step"  # its bound is one of the step
    single_s = 0.0
    covered = search.problem.options.searches(plan)
    if covered and not plan.is_divided:
        proven_by, scope = tuple(sorted(search.proofs)), _scope(search, options)
        if plan.objective != "cost" and not plan.is_replicated:
            single_s = min(search.bound_of(shares=False), value)
    else:
        bound, proven_by, scope = of_all, (TOTAL_WORK,), _any_scope(search, options)
        if covered:
            kept = _that_keep_hints(search, options).rstrip(",")
            scope = f"{kept}, also those that divide optimizer state, with {_counts(search)}"
    bound = min(bound, value)
    gap = (value - bound) / value if value else 0.0
    solved = covered and bool({RELAXATION, INTEGER_PROGRAM} & {best.found_by, *search.proofs})
    return SolverReport(
        name={"highs": "HiGHS", "cbc": "CBC"}[options.solver] if solved else "assigner",
        version=search.state.backend.version() if solved else __version__,
        status="optimal" if gap <= options.stop_gap + PROVEN else "feasible",
        objective_s=value,
        bound_s=bound,
        gap=0.0 if gap <= PROVEN else gap,
        seconds=search.state.clock.elapsed_s,
        options=options.record(),
        found_by=best.found_by,
        proven_by=proven_by,
        scope=scope,
        interrupted=search.state.interrupted,
        single_bound_s=single_s if single_s > bound else None,
        any_order_s=of_all if ranges_over_orders else None,
        any_order_found_s=search.any_order_found_s if ranges_over_orders else None,
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
        raise AssignerError(
            f"the plan needs {worker.peak_bytes:.0f} bytes on {worker.worker}, which has {worker.capacity_bytes:.0f}",
            hint="this is a bug in the solver: please report it with the profile",
        )


def _scope(search: Search, options: SolveOptions) -> str:
    """Which plans the bound is about: where workers share a stage, those of which each updates the whole stage.

    To divide the updates saves the bytes of optimizer state, and the seconds of updates: without both it gains nothing.
    """
    kinds = list(dict.fromkeys(each.schedule for each in search.candidates))
    stages = "any number of stages" if "interleaved" in kinds else "one stage"
    most, profile = search.problem.most_replicas, search.problem.profile
    gains = any(
        [*(each.optimizer_bytes for each in profile.partitions), *(each.update_s for each in profile.measurements)]
    )
    shared = (
        f", up to {most} workers a stage,{f' {UNDIVIDED},' if gains else ''}"
        if most > 1
        else " and one worker a stage,"
    )
    under = " or ".join(sorted(kinds))
    return f"{_that_keep_hints(search, options)} with {stages} a worker{shared} under {under} with {_counts(search)}"


def _any_scope(search: Search, options: SolveOptions) -> str:
    """The plans that a search over orders is about."""
    most = search.problem.most_replicas
    shared = f" and up to {most} workers a stage" if most > 1 else ""
    kept = _that_keep_hints(search, options)
    return f"{kept} with any number of stages a worker{shared} in any order with {_counts(search)}"


def _that_keep_hints(search: Search, options: SolveOptions) -> str:
    """Hints are the options' or, in the profile and by what they have become in the problem, those of marks."""
    marked = any(each.pin or each.colocate for each in search.problem.profile.partitions)
    hinted = options.hinted or search.problem.options.hinted or marked
    return "plans that keep the hints," if hinted else "plans"


def _counts(search: Search) -> str:
    """The numbers of micro-batches that were looked at."""
    counts = sorted({each.micro_batches for each in search.candidates})
    if len(counts) == 1:
        return fmt.plural(counts[0], "micro-batch")
    equal = " equal" if all(search.problem.workload.batch_size % each == 0 for each in counts) else ""
    return f"{f'{counts[0]} to {counts[-1]}' if equal else ', '.join(map(str, counts))}{equal} micro-batches"


def _candidates(search: Search, best: Proposal, bound: float) -> tuple[Candidate, ...]:
    """All candidates; where the plan is a baseline's, it stands for the candidate that it would belong to."""
    alike: dict[tuple[str, int], list[CandidateSearch]] = {}
    for candidate in search.candidates:  # along each order of a graph there is one
        alike.setdefault((candidate.schedule, candidate.micro_batches), []).append(candidate)
    plan, found = best.plan, list[Candidate]()
    for candidates in alike.values():
        found.append(_candidate(search, candidates, best, min(each.bound for each in candidates)))
    if best is search.state.best or plan.objective != "step":
        return tuple(found)
    chosen = Candidate(
        plan.schedule, plan.micro_batches, plan.micro_batch_size, best.value, min(bound, best.value), "chosen"
    )
    others = [each for each in found if (each.schedule, each.micro_batches) != (plan.schedule, plan.micro_batches)]
    return (*others, chosen)


def _candidate(search: Search, candidates: Sequence[CandidateSearch], best: Proposal, bound: float) -> Candidate:
    """What came of the candidates of one schedule and micro-batch count."""
    gap, first = search.state.gap, candidates[0]
    value = min(candidate.best_value for candidate in candidates)
    if any(candidate.best is best for candidate in candidates):
        status = "chosen"
    elif math.isinf(bound):
        status = "infeasible: nothing fits"
    elif bound >= best.value * (1 - PROVEN):
        status = "proven worse" if bound > best.value * (1 + PROVEN) else "proven no better"
    elif value < best.value * (1 - PROVEN):
        status = "needs more memory"
    elif all(candidate.decided for candidate in candidates) or bound >= best.value * (1 - gap - PROVEN):
        status = f"gains {fmt.percent(max(0.0, 1 - bound / best.value))} at most"
    else:
        status = "not decided"
    return Candidate(
        first.schedule, first.micro_batches, first.size, None if math.isinf(value) else value,
        None if math.isinf(bound) else bound, status,
    )  # fmt: skip


def no_offer(
    budget: Budget, frontier: Sequence[Proposal], profile: Profile, options: SolveOptions
) -> InfeasibleError | LimitError:
    """Why no plan meets the step time asked for."""
    state = budget.search.state
    if budget.fastest_bound_s > (options.max_step_s or math.inf) or math.isinf(budget.fastest_bound_s):
        return explain(profile, options, left_s=state.clock.left_s)
    if not frontier:
        least = budget.fastest_bound_s
        told = f", and any takes {fmt.seconds(least)} a step or more" if 0 < least < math.inf else ""
        return LimitError(
            f"no plan was found in {fmt.seconds(state.clock.elapsed_s)}{told}", hint="a longer --time-limit"
        )
    fastest = frontier[-1]
    return LimitError(
        f"no plan of {options.max_step_s:g} s a step or less was found: the fastest takes"
        f" {fmt.seconds(fastest.value)}, and {fmt.seconds(budget.fastest_bound_s)} is not ruled out",
        hint=f"--max-step {fastest.value:.4g} fits, at {1000 * budget.money(fastest):.4g} per 1000 samples",
    )


def no_plan(search: Search, profile: Profile, options: SolveOptions) -> InfeasibleError | LimitError:
    """Why no plan was found: there is none, or a limit came first."""
    state = search.state
    if search.decided:
        several: Excluded = "not asked for"
        if search.any_order:
            several = "proven" if search.any_order_excluded else "open"
        return explain(profile, options, left_s=state.clock.left_s, several=several)
    (schedule, count), *more = dict.fromkeys(
        (candidate.schedule, candidate.micro_batches) for candidate in search.candidates if not candidate.decided
    )
    open_ = f"{schedule} with {fmt.plural(count, 'micro-batch')}"
    return LimitError(
        f"no plan was found in {fmt.seconds(state.clock.elapsed_s)}, and it is not proven that there is none: {open_}"
        + (f" and {fmt.plural(len(more), 'candidate')} more are open" if more else " is open")
        + (f"; any plan takes {fmt.seconds(search.bound)} or more" if 0 < search.bound < math.inf else ""),
        hint=f"{'a longer --time-limit' if state.clock.left_s <= 0 else 'more memory'}, or a fixed --micro-batches",
    )
