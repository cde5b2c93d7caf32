"""Placement: which worker runs which partitions, with a proof of how good that is.

    options ─ hints ─┐
    profile ─────────┴─ solve ─ Search ─┬─ candidates: each a schedule and micro-batch count ─┬─ report ─ Solution
                                        └─ SearchState: the clock, the solver, the best plan ─┘

    report.py   what the search found, as a Solution     whatif.py   what one change would bring
    export.py   the ILP as a file                        robust/     what if the measurements were off

Each of these imports those below it alone:

    why/        why nothing fits, and ways out
    orders/     several stages a worker, in any order: list scheduling, local search, bounds
    search/     the steps of every candidate; the simplest of the best plans; money against time
    free/       convex stages of branched graphs, several stages a worker: exhaustive search, local search, bounds
    pipelines/  one stage a worker, any schedule and objective, stages that workers share: the dynamic program, the
                simulator, the ILP
    fleet/      chains of any size, by kinds of workers and hosts: of GPipe, branch and bound over the slowest servers
    baselines/  simpler placements
    candidates/ what all candidates have in common: the clock, the solver, the best plan, the local search
    ilp/        the integer programs that state the problem, in PuLP
    problem/    what is asked for, and what everything costs, what fits
    limits/     what each search may spend, and when it ends

The solvers (PuLP, HiGHS, CBC) and numpy are imported inside `solve`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import InfeasibleError, UsageError
from assigner.solver.problem.answer import FrontierPoint, Progress, Solution
from assigner.solver.problem.hints import completing, resolve
from assigner.solver.problem.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.candidates.state import Proposal
    from assigner.solver.search.search import Search

__all__ = [
    "FrontierPoint",
    "Progress",
    "Solution",
    "SolveOptions",
    "completing",
    "solve",
    "solve_baseline",
]


def solve(
    profile: Profile,
    options: SolveOptions | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan for the objective with one stage a worker, proven to within `options.stop_gap`, or a faster one.

    Any worker may be left out, in any order. Rematerialisation, the number of micro-batches, the schedule and its
    warm-up depths are chosen together with the placement. Then, for the step time, plans whose stages several workers
    share, proven beside these as far as `solver/pipelines/shared.py` says, and plans with several stages a worker and
    any order of actions, of which is known how far from the best they may be at most.

    Args:
        profile: The measurements.
        options: What is asked for; None: the defaults.
        progress: Called now and then. If it raises KeyboardInterrupt, that is Ctrl-C, which ends the search as the time
            limit does: with the best plan so far, a baseline if there is no other.

    Returns:
        The plan, priced by the simulator, with solver report and baselines; its reference to the profile, date and
        tool version are left to the caller.

    Raises:
        UsageError: the options do not fit the profile.
        InfeasibleError: no plan exists; the message names the tightest obstacle, the hint a way out that was found by
            solving.
        LimitError: the time limit came before any plan.
        KeyboardInterrupt: Ctrl-C came before any plan, or a second time.
    """
    from assigner.solver.baselines import find_baselines
    from assigner.solver.report import make_solution, no_plan
    from assigner.solver.search.relief import relieved
    from assigner.solver.search.search import Search

    options = options or SolveOptions()
    if options.objective == "cost":
        return _cheapest(profile, options, progress)
    search = Search(*resolve(profile, options), progress)
    search.ended_by_interrupt(search.price)
    # first, so that there is a plan however soon the time is over
    simple = search.ended_by_interrupt(lambda: find_baselines(search.problem))
    search.run()
    best, bound, fastest_s = search.state.best, search.bound, search.state.best_value
    if options.objective == "step" or best is None:
        best = search.ended_by_interrupt(lambda: _chosen(search, simple))
    lighter = search.ended_by_interrupt(lambda: relieved(search, best)) if options.objective == "step" else None
    if lighter is not None:
        best, fastest_s = lighter, min(fastest_s, lighter.value)
    if search.any_order:
        from assigner.solver.orders.search import with_orders

        best = with_orders(search, best, simple, fastest_s=fastest_s)
    if best is None and search.state.interrupted:
        raise KeyboardInterrupt
    if best is None:
        raise no_plan(search, profile, options)
    return make_solution(search, best, search.bound if best is search.state.best else bound, options, simple)


def _chosen(search: Search, simple: Sequence[FoundBaseline]) -> Proposal | None:
    """The fastest plan, a baseline if one is faster, or of plans within the gap the one that is preferred."""
    from assigner.solver.search.preference import preferred, simpler

    best = simpler(search, simple) or search.state.best
    if best is None:
        return None
    chosen = preferred(search, best, simple) if search.state.options.objective == "step" else best
    for candidate in search.candidates:
        if (candidate.schedule, candidate.micro_batches) == (chosen.plan.schedule, chosen.plan.micro_batches):
            search.state.best = candidate.best = chosen
            break
    return chosen


def _cheapest(profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None) -> Solution:
    """The plan that costs least within a step time, and the frontier of money against step time."""
    from assigner.solver.baselines import find_baselines
    from assigner.solver.candidates.state import Proposal
    from assigner.solver.report import make_solution, no_offer
    from assigner.solver.search.budget import Budget

    budget = Budget(*resolve(profile, options), progress)
    simple = budget.search.ended_by_interrupt(lambda: find_baselines(budget.problem))
    frontier = budget.run([(each.plan, each.step_s) for each in simple if each.plan and options.searches(each.plan)])
    best = budget.cheapest(frontier)
    if not frontier and budget.search.state.interrupted:
        raise KeyboardInterrupt
    if best is None:
        raise no_offer(budget, frontier, profile, options)
    proposal = Proposal(replace(best.plan, objective="cost"), budget.money(best), best.found_by)
    solution = make_solution(budget.search, proposal, budget.bound, options, simple)
    points = tuple(FrontierPoint(budget.money(each), each.value, each.plan.workers, each is best) for each in frontier)
    return replace(solution, plan=replace(solution.plan, candidates=()), frontier=points)


def solve_baseline(profile: Profile, name: str, options: SolveOptions | None = None) -> Plan:
    """A baseline as a plan, priced by the same simulator: for comparing, and for running.

    Args:
        profile: The measurements.
        name: A key of `assigner.solver.baselines.TITLES`: "single", "equal", "proportional", "balance", ...
        options: Micro-batches, remat, pins, batch size and the most workers a stage are heeded.

    Raises:
        UsageError: no such baseline, or the options do not fit the profile.
        InfeasibleError: it does not fit the workers.
    """
    options = options or SolveOptions()
    from assigner.formats.solverreport import SolverReport
    from assigner.schedule.cost import CostModel
    from assigner.schedule.simulate import prediction_of
    from assigner.solver.baselines import TITLES, makers
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem.problem import Problem

    if name not in TITLES:
        raise UsageError(f"baseline {name!r} is not known; expected {', '.join(TITLES)}")
    start = time.monotonic()
    resolved, plain = resolve(profile, options)
    problem = Problem(resolved, plain, CostModel(resolved))
    pricing = BaselinePrices(problem, most_replicas=options.max_replicas)
    plan, step = pricing.best(makers()[name](pricing))
    if plan is None:
        raise InfeasibleError(
            f"{TITLES[name]} does not fit this profile's workers, or breaks a hint or a mark",
            hint="assigner solve finds a plan that does, if any",
        )
    predicted, seconds = prediction_of(plan, problem.cost), time.monotonic() - start
    report = SolverReport(TITLES[name], "", "feasible", step, 0.0, 1.0, seconds, options.record())
    return replace(plan, predicted=predicted, solver=report)
