"""From a finished search to the answer: the plan with its price, its proof, the baselines and what was left behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import AssignerError, InfeasibleError, LimitError
from assigner.plan import SolverReport
from assigner.simulate import overfull, predict
from assigner.solver.answer import Candidate, Solution
from assigner.solver.baselines import price_baselines
from assigner.solver.contest import PROVEN
from assigner.solver.limiting import limiting
from assigner.solver.search import Search
from assigner.solver.why import explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.plan import Plan, Prediction
    from assigner.profile import Profile
    from assigner.solver.answer import Progress
    from assigner.solver.options import SolveOptions
    from assigner.solver.setting import Setting

RELAXED_S = 5.0
"""Seconds for each way out of an infeasible problem."""


def answer(profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None = None) -> Solution:
    """Search and report; arguments and errors as `solve`."""
    search = Search(profile, options, progress)
    search.run()
    if search.contest.best is None:
        raise _no_plan(search)
    plan = search.contest.best.plan
    prediction = predict(plan, profile, search.problem.cost)
    _check(search, prediction)
    plan = replace(
        plan, predicted=prediction, solver=_report(search, prediction), baselines=price_baselines(search.problem)
    )
    return Solution(
        plan=_timed(search, plan),
        candidates=tuple(_candidate(search, setting) for setting in search.settings),
        limiting=limiting(plan, prediction, search.problem.cost),
    )


def _timed(search: Search, plan: Plan) -> Plan:
    assert plan.solver is not None
    return replace(plan, solver=replace(plan.solver, seconds=search.contest.elapsed_s))


def _check(search: Search, prediction: Prediction) -> None:
    """Raise AssignerError if the search and the simulator disagree: a bug that must not be hidden."""
    told, found = search.contest.best_value, prediction.step_s
    if abs(told - found) > PROVEN * found:
        raise AssignerError(
            f"the solver says {told:.9g} s for a plan that the simulator prices at {found:.9g} s",
            hint="this is a bug in the solver: please report it with the profile",
        )
    for worker in overfull(prediction):
        if worker.peak_bytes > worker.capacity_bytes * (1 + 1e-9):  # less is rounding
            raise AssignerError(
                f"the plan needs {worker.peak_bytes:.0f} bytes on {worker.worker}, which has"
                f" {worker.capacity_bytes:.0f}",
                hint="this is a bug in the solver: please report it with the profile",
            )


def _report(search: Search, prediction: Prediction) -> SolverReport:
    step = prediction.step_s
    bound = min(search.bound, step)
    gap = (step - bound) / step if step else 0.0
    options = search.contest.options
    return SolverReport(
        name={"highs": "HiGHS", "cbc": "CBC"}[options.solver],
        version=search.contest.backend.version(),
        status="optimal" if gap <= options.gap + PROVEN else "feasible",
        objective_s=step,
        bound_s=bound,
        gap=0.0 if gap <= PROVEN else gap,
        seconds=search.contest.elapsed_s,
        options=options.record() | {"proven_by": sorted(search.contest.proofs)},
    )


def _candidate(search: Search, setting: Setting) -> Candidate:
    contest = search.contest
    if contest.best is not None and setting.best is contest.best:
        status = "chosen"
    elif math.isinf(setting.bound):
        status = "infeasible: no chain of stages fits"
    elif setting.decided or setting.bound >= contest.best_value * (1 - contest.options.gap - PROVEN):
        status = "proven worse"
    else:
        status = "not decided"
    return Candidate(
        setting.schedule, setting.micro_batches, setting.size,
        None if setting.best is None else setting.best.value, setting.bound, status,
    )  # fmt: skip


def _no_plan(search: Search) -> InfeasibleError | LimitError:
    if search.decided:
        return explain(search.problem, lambda profile, options: _plan_count(profile, options, search.contest.left_s))
    return LimitError(
        f"no plan was found in {search.contest.options.time_limit:g} s, and none was proven impossible",
        hint="a longer --time-limit, or a fixed --micro-batches",
    )


def _plan_count(profile: Profile, options: SolveOptions, left_s: float) -> int | None:
    """The micro-batch count of some plan for a relaxed problem; None: none was found in the time."""
    if left_s <= 0:
        return None
    search = Search(profile, replace(options, time_limit=min(RELAXED_S, left_s)))
    search.run(first_plan=True)
    return None if search.contest.best is None else search.contest.best.plan.micro_batches
