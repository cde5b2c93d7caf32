"""Placement: which worker runs which partitions, with a proof of how good that is.

    options ─ hints ─┐
    profile ─────────┴─ solve ─ Search ─┬─ a Setting for each schedule and micro-batch count ─┬─ report ─ Solution
                                        └─ Contest: the clock, the solver, the best plan ─────┘

    solve.py    the main: what is done, in which order          search.py   the steps of every setting
    prices.py   the one price table: stage options and messages
    memory.py   what fits, what is rematerialised for it, and where the optimizer's state is divided
    relief.py   plans with divided state that are faster than the best without, where memory binds
    replica_options.py, shares.py   stages that several workers share: who may, with how many micro-batches each
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
    from collections.abc import Callable
    from pathlib import Path

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.export import ModelFile

__all__ = [
    "FrontierPoint",
    "Progress",
    "Solution",
    "SolveOptions",
    "check_exportable",
    "completing",
    "export_model",
    "price_what_ifs",
    "solve",
    "solve_baseline",
    "what_ifs_are_cheap",
]


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


def check_exportable(profile: Profile, options: SolveOptions, path: Path) -> None:
    """Raise UsageError where no integer program states what is asked, or it is too large: before the search.

    Args:
        profile: The measurements.
        options: What will be solved.
        path: Where the model will be written: its ending says how.
    """
    from assigner.solver import export

    export.check_exportable(profile, options, path)


def export_model(
    plan: Plan,
    profile: Profile,
    options: SolveOptions,
    path: Path,
    *,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ModelFile:
    """Write the integer program of the plan's schedule and micro-batch count, with the cuts that close its proof.

    It is over all plans with one stage a worker along an order of which the plan's stages are intervals: of a chain,
    all that there are.

    Args:
        plan: What `solve` found.
        profile: What it was solved from.
        options: What it was solved with. Closing the proof may take what the search left of the time limit.
        path: The file, which ends in `.lp` (CPLEX's format) or `.mps` (free MPS).
        force: An existing file may be replaced.
        progress: Called now and then while the proof is closed. KeyboardInterrupt ends that, and the model is written
            with the cuts found until then.

    Raises:
        UsageError: no integer program states the problem, it is too large, or the file cannot be written.
    """
    from assigner.solver import export

    return export.export_model(plan, profile, options, path, force=force, progress=progress)


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
    from assigner.formats.plan import SolverReport
    from assigner.schedule.cost import CostModel
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
