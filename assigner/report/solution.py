"""What a search found: what was asked, the candidates, the plan, how good it is and what would make it better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.doubts import doubt_lines
from assigner.report.plan import CHOSEN, baselines, bottleneck, candidates, describe_solver, headline, plan_data, stages
from assigner.report.sharing import sharing
from assigner.report.sheet import Column, Line, Report, Sheet, with_hosts
from assigner.report.spread import doubt
from assigner.report.whatif import what_if

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.solverreport import SolverReport
    from assigner.solver import Progress, Solution

FEW = 6
"""Candidates on a screen that does not list everything."""


def solution_report(solution: Solution, *, profile: Profile | None = None, everything: bool = False) -> Report:
    """What `assigner solve` prints, but for where the plan was written; what counts most stands last."""
    plan = solution.plan
    simple = baselines(plan) if plan.objective == "step" else ()
    parts = (
        *asked(plan), *candidates(plan, most=None if everything else FEW), *frontier(solution), *headline(plan),
        stages(plan, everything=everything), *what_if(plan), *_unpriced(plan), *simple, *proof_lines(plan),
        *doubt_lines(plan, profile), *bottleneck(plan, profile), *sharing(plan, profile),
    )  # fmt: skip
    return with_hosts(parts, profile)


def _unpriced(plan: Plan) -> Report:
    """How many what-ifs an interruption or the time limit left out."""
    left_out = plan.solver.options.get("what_if_left_out", 0) if plan.solver else 0
    if not left_out:
        return ()
    return (Line(f"{fmt.plural(left_out, 'what-if')} not priced: interrupted, or the time was over", "warning"),)


def asked(plan: Plan) -> Report:
    """The settings that are not at their defaults; nothing where all are."""
    from assigner.solver import SolveOptions

    given = plan.solver.options if plan.solver else {}
    usual = {**SolveOptions().record(), "robust": False}
    told = [f"{name.replace('_', ' ')} {_setting(name, given[name])}"
            for name in usual if name in given and given[name] != usual[name]]  # fmt: skip
    return (Line(f"asked for: {' · '.join(told)}"),) if told else ()


def _setting(name: str, value: Any) -> str:
    """A setting's value as it is written on the line."""
    if isinstance(value, dict):
        show = fmt.size if name in ("reserve", "memory") else _text
        return ", ".join(f"{key}={show(each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(",".join(each) if isinstance(each, list) else each for each in value)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def proof_lines(plan: Plan) -> Report:
    """How good the plan is known to be: the status, and what it rests on."""
    if plan.solver is None:
        return ()
    return (Line(describe_solver(plan.solver)), *_bound(plan, plan.solver))


def _bound(plan: Plan, solver: SolverReport) -> Report:
    if solver.bound_s <= 0:
        return ()
    if plan.objective == "cost":
        verb, values = "costs", [f"{1000 * each:.4g} per 1000 samples" for each in (solver.objective_s, solver.bound_s)]
    else:
        unit = fmt.time_unit(solver.objective_s)
        verb, values = "takes", [unit.text(solver.objective_s), unit.text(solver.bound_s)]
    where = "at the slow end of the measurements: " if solver.options.get("robust") else ""
    of = f"none of the {solver.scope}" if solver.scope else "no plan"
    said = Line(f"{where}found {values[0]}, {of} {verb} less than {values[1]}")
    return (said, *_any_order(solver), *_one_stage(plan, solver))


def _any_order(solver: SolverReport) -> Report:
    """What is known of plans in any order: whether a faster one was found, and how far the best may be from this."""
    if solver.any_order_s is None or not solver.objective_s:
        return ()
    unit, told = fmt.time_unit(solver.objective_s), list[str]()
    if solver.any_order_found_s is not None:
        gain = fmt.percent(1 - solver.any_order_found_s / solver.objective_s)
        found = unit.text(solver.any_order_found_s)
        told.append(f"one of {found} was found, {gain} less: not taken for so little (--schedule listed takes it)")
    if solver.any_order_s != solver.bound_s:
        share = fmt.percent(max(0.0, 1 - solver.any_order_s / solver.objective_s))
        told = told or ["no faster plan was found"]
        told.append(f"none takes less than {unit.text(solver.any_order_s)}, {share} below")
    return (Line(f"with several stages a worker, in any order, {'; '.join(told)}"),) if told else ()


def _one_stage(plan: Plan, solver: SolverReport) -> Report:
    """Of a plan with several stages a worker, or listed orders: what is proven of those with one stage a worker."""
    if solver.any_order_s is None or solver.any_order_s != solver.bound_s:
        return ()
    proven = [each.bound_s for each in plan.candidates if each.schedule in ("gpipe", "1f1b") and each.bound_s]
    if not proven or min(proven) <= solver.objective_s:
        return ()
    least = fmt.time_unit(solver.objective_s).text(min(proven))
    return (Line(f"gpipe and 1f1b, with one stage a worker and updates undivided, take {least} or more"),)


def frontier(solution: Solution) -> Report:
    """Money against step time: every plan that no other beats in both, the chosen one marked."""
    if not solution.frontier:
        return ()
    time = fmt.time_unit(*(each.step_s for each in solution.frontier))
    rows = [
        (
            (Column("per 1000 samples"), f"{1000 * each.money:.4g}"),
            (Column(f"step {time.name}"), time.show(each.step_s)),
            (Column("workers"), fmt.count(len(each.workers))),
            (Column("which", "text"), fmt.ranges(each.workers)),
            (Column("status", "name"), CHOSEN if each.chosen else ""),
        )
        for each in solution.frontier
    ]
    marked = frozenset(n for n, each in enumerate(solution.frontier) if each.chosen)
    return (Sheet.of("cost against step time", rows, marked),)


def solution_data(solution: Solution, *, profile: Profile | None = None) -> dict[str, Any]:
    """The same for `--json`: the plan with what is derived from it, the frontier of money and step time, and doubts."""
    data = plan_data(solution.plan, profile=profile)
    data["derived"]["frontier"] = [encode(each) for each in solution.frontier]
    data["derived"]["doubt"] = None if profile is None else doubt(profile)
    return data


def progress_text(progress: Progress, *, elapsed_s: float, time_limit: float) -> str:
    """One line on a search under way: incumbent, bound, gap, time left, and what is at work.

    What the search said last may be some seconds old.
    """
    left = f"{max(0.0, time_limit - elapsed_s):.0f} s left"
    if progress.pricing:
        return f"{left} · {progress.pricing}"
    if progress.schedule == "workers":
        return _choices_text(progress, left)
    unit = fmt.time_unit(progress.incumbent_s, progress.bound_s)
    parts = [f"best {unit.text(progress.incumbent_s)}" if progress.incumbent_s is not None else "no plan yet"]
    if 0 < progress.bound_s < math.inf:
        parts.append(f"bound {unit.text(progress.bound_s)}")
        if progress.incumbent_s:
            parts.append(f"gap {fmt.percent(max(0.0, 1 - progress.bound_s / progress.incumbent_s))}")
    parts += [left, f"{progress.done}/{progress.total} decided"]
    parts.append(f"{progress.schedule} x {progress.micro_batches}")
    return " · ".join(parts)


def _choices_text(progress: Progress, left: str) -> str:
    """The line of a search for the cheapest plan."""
    money = None if progress.incumbent_s is None else 1000 * progress.incumbent_s
    best = "no plan yet" if money is None else f"best {money:.4g} per 1000 samples"
    choices = f"{progress.done} of {fmt.plural(progress.total, 'choice')} of workers solved"
    return " · ".join((best, f"bound {1000 * progress.bound_s:.4g}", left, choices))
