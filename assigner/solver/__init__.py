"""Placement: which worker runs which partitions, with a proof of how good that is.

    options ─ hints ─┐
    profile ─────────┴─ Problem ─ Search ─┬─ a Setting for each schedule and micro-batch count ─┬─ report ─ Solution
                                          └─ Contest: the clock, the solver, the best plan ─────┘

    chain/      GPipe, one stage a worker: beam, local search, segment ILP
    fleet/      the same at any size: branch and bound over the slowest servers, hosts, kinds of workers
    ladder/     1F1B, throughput, latency: a dynamic program from the last stage to the first
    free/       convex stages of branched graphs, several stages a worker: exhaustive search, local search, ILP bounds
    whatif.py   what one change would bring
    load/       max load in the forms of published planners; throughput of branched graphs
    budget.py   money against step time      why/       why nothing fits, and ways out
    baselines/  simpler placements           robust/    what if the measurements were off

The solvers (PuLP, HiGHS, CBC) and numpy are imported inside `solve`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import InfeasibleError, UsageError
from assigner.plan import SolverReport
from assigner.solver.answer import FrontierPoint, Progress, Solution
from assigner.solver.hints import completing
from assigner.solver.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.plan import Plan
    from assigner.profile import Profile

__all__ = [
    "FrontierPoint",
    "Progress",
    "Solution",
    "SolveOptions",
    "completing",
    "price_what_ifs",
    "solve",
    "solve_baseline",
    "what_ifs_are_cheap",
]


def solve(
    profile: Profile,
    options: SolveOptions | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan for the objective with one stage a worker, proven to within `options.gap`.

    Any worker may be left out, in any order. Rematerialisation, the number of micro-batches, the schedule and its
    warm-up depths are chosen together with the placement.

    Args:
        profile: The measurements.
        options: What is asked for; None: the defaults.
        progress: Called now and then. If it raises KeyboardInterrupt, that is Ctrl-C: the best plan so far is
            returned, with status "feasible", if there is one.

    Returns:
        The plan, priced by the simulator, with solver report and baselines; its reference to the profile, date and
        tool version are left to the caller.

    Raises:
        UsageError: the options do not fit the profile.
        InfeasibleError: no plan exists; the message names the tightest obstacle, the hint a way out that was found by
            solving.
        LimitError: the time limit came before any plan.
    """
    options = options or SolveOptions()
    from assigner.solver.report import answer

    return answer(profile, options, progress)


def price_what_ifs(
    solution: Solution,
    profile: Profile,
    options: SolveOptions | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The solution with its plan's what-ifs: what more micro-batches, one more worker or a wider wire would bring.

    Args:
        solution: What `solve` found; of another objective than "step" it comes back as it is.
        profile: What it was solved from.
        options: What it was solved with; what its search left of the time limit is for the what-ifs.
        progress: Called now and then, with what is priced. KeyboardInterrupt, raised by it or by Ctrl-C, ends the
            pricing: the what-ifs that are complete are kept.
    """
    from assigner.solver.whatif import priced

    return priced(solution, profile, options or SolveOptions(), progress)


def what_ifs_are_cheap(profile: Profile, options: SolveOptions | None = None) -> bool:
    """Whether `price_what_ifs` takes seconds, judged by the size of the problem alone and not by the clock."""
    from assigner.solver.whatif import cheap

    return cheap(profile, options or SolveOptions())


def solve_baseline(profile: Profile, name: str, options: SolveOptions | None = None) -> Plan:
    """A baseline as a plan, priced by the same simulator: for comparing, and for running.

    Args:
        profile: The measurements.
        name: A key of `assigner.solver.baselines.TITLES`: "single", "equal", "proportional", "balance", ...
        options: Micro-batches, remat, pins and batch size are heeded.

    Raises:
        UsageError: no such baseline, or the options do not fit the profile.
        InfeasibleError: it does not fit the workers.
    """
    options = options or SolveOptions()
    from assigner.cost import CostModel
    from assigner.solver.baselines import TITLES, baseline_plan
    from assigner.solver.hints import resolve
    from assigner.solver.problem import Problem

    if name not in TITLES:
        raise UsageError(f"baseline {name!r} is not known; expected {', '.join(TITLES)}")
    start = time.monotonic()
    resolved, plain = resolve(profile, options)
    plan = baseline_plan(Problem(resolved, plain, CostModel(resolved)), name)
    if plan is None:
        raise InfeasibleError(
            f"{TITLES[name]} does not fit this profile's workers", hint="assigner solve finds a plan that does, if any"
        )
    assert plan.predicted is not None
    step, seconds = plan.predicted.step_s, time.monotonic() - start
    return replace(plan, solver=SolverReport(TITLES[name], "", "feasible", step, 0.0, 1.0, seconds, options.record()))
