"""Placement: which worker runs which partitions, with a proof of how good that is.

    options ─ hints ─┐
    profile ─────────┴─ solve ─ Search ─┬─ candidates: each a schedule and micro-batch count ─┬─ report ─ Solution
                                        └─ SearchState: the clock, the solver, the best plan ─┘

    solve.py    the main: what is done, in which order
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
    methods/    the dynamic program, the local search; what all candidates have in common
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
from assigner.solver.problem.hints import completing
from assigner.solver.problem.options import SolveOptions
from assigner.solver.solve import solve

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

__all__ = [
    "FrontierPoint",
    "Progress",
    "Solution",
    "SolveOptions",
    "completing",
    "solve",
    "solve_baseline",
]


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
    from assigner.solver.problem.hints import resolve
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
