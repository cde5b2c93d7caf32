"""Placement: which worker runs which partitions, with a proof of how good that is.

    options ─ hints ─┐
    profile ─────────┴─ solve ─ Search ─┬─ a Setting for each schedule and micro-batch count ─┬─ report ─ Solution
                                        └─ Contest: the clock, the solver, the best plan ─────┘

    solve.py    the main: what is done, in which order          search.py   the steps of every setting
    prices.py   the one price table: stage options and messages
    memory.py   what fits, what is rematerialised for it, and where the optimizer's state is divided
    relief.py   plans with divided state that are faster than the best without, where memory binds
    replica_options.py   stages that several workers share: who may, with how many micro-batches each
    dynamic_program.py, objectives.py   pipelines from the last stage to the first, for every schedule and objective
    local_search.py   from a plan to better neighbours     perfect_split.py   the bound that all share
    tuning.py   what each search may spend            clock.py  when a search has to end
    ilp/        the integer programs that state the problem, in PuLP
    ladder/     one stage a worker, any schedule and objective, stages that workers share: the dynamic program, the
                simulator, the ILP
    fleet/      GPipe at any size: branch and bound over the slowest servers, hosts, kinds of workers
    free/       convex stages of branched graphs, several stages a worker: exhaustive search, local search, bounds
    orders/     several stages a worker, in any order: list scheduling, local search, bounds
    whatif.py   what one change would bring     export.py  the ILP as a file
    budget.py   money against step time      why/       why nothing fits, and ways out
    baselines/  simpler placements           robust/    what if the measurements were off

The solvers (PuLP, HiGHS, CBC) and numpy are imported inside `solve`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import InfeasibleError, UsageError
from assigner.solver.answer import FrontierPoint, Progress, Solution
from assigner.solver.hints import completing
from assigner.solver.options import SolveOptions
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
    from assigner.formats.plan import SolverReport
    from assigner.schedule.cost import CostModel
    from assigner.solver.baselines import TITLES, baseline_plan
    from assigner.solver.hints import resolve
    from assigner.solver.problem import Problem

    if name not in TITLES:
        raise UsageError(f"baseline {name!r} is not known; expected {', '.join(TITLES)}")
    start = time.monotonic()
    resolved, plain = resolve(profile, options)
    plan = baseline_plan(Problem(resolved, plain, CostModel(resolved)), name, most_replicas=options.max_replicas)
    if plan is None:
        raise InfeasibleError(
            f"{TITLES[name]} does not fit this profile's workers, or breaks a hint or a mark",
            hint="assigner solve finds a plan that does, if any",
        )
    assert plan.predicted is not None
    step, seconds = plan.predicted.step_s, time.monotonic() - start
    return replace(plan, solver=SolverReport(TITLES[name], "", "feasible", step, 0.0, 1.0, seconds, options.record()))
