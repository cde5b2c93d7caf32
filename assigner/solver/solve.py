"""The solver's main: hints into the problem, the search, the choice among plans as good, the answer.

What an answer claims comes about so:

    found by     every plan is offered by a candidate (`CandidateSearch.offer`, methods/candidate.py) with the name of
                 what found it, `Proposal.found_by`; the best of all candidates is `SearchState.best`
    proven by    a candidate says that none of its plans is below a bound, with the name of what proves it
                 (`CandidateSearch.raise_bound`); the least of these is `Search.bound`, the names `Search.proofs`
    of which     report.py: the candidates there were, in words (`scope`); of a plan that is none of theirs, as one
    plans        with an order of its own, what bounds all plans takes the place of bound and proof

Which search finds and which proves, candidate by candidate, is the table in search/search.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.solver.problem.answer import FrontierPoint, Progress, Solution
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.profile import Profile
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.methods.candidate import Proposal
    from assigner.solver.search.search import Search


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
        UsageError: the options do not fit the profile, or it is none.
        InfeasibleError: no plan exists; the message names the tightest obstacle, the hint a way out that was found by
            solving.
        LimitError: the time limit came before any plan.
        KeyboardInterrupt: Ctrl-C came before any plan, or a second time.
    """
    from assigner.formats.profile import Profile

    if not isinstance(profile, Profile):
        hint = "assigner.load_profile(PATH) reads one"
        raise UsageError(f"solve takes a Profile, and this is of type {type(profile).__name__}", hint=hint)
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
    search.begin_with(simple)
    with search.keeping_time_for_orders():
        search.run()
        best, bound, fastest_s = search.state.best, search.bound, search.state.best_value
        if options.objective == "step" or best is None:
            best = search.ended_by_interrupt(lambda: _chosen(search, simple))
        if options.objective == "step":
            best = search.ended_by_interrupt(lambda: relieved(search, best)) or best
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
    from assigner.solver.methods.candidate import Proposal
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
