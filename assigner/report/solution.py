"""What a search found: the plan, the candidates that it was chosen from, and what limits it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.plan import baselines, describe_solver, headline, stages
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from assigner.solver import Progress, Solution

WHAT = {"step": "step", "throughput": "steady batch", "latency": "forward", "cost": "step"}
"""What the candidates are compared by, by objective."""

CHOSEN = "chosen"
"""The status of the candidate that became the plan."""


def solution_report(solution: Solution) -> Report:
    """What `assigner solve` prints, but for where the plan was written."""
    plan = solution.plan
    lines = [Line(describe_solver(plan.solver))] if plan.solver else []
    lines += [Line(solution.limiting)] if solution.limiting else []
    simple = baselines(plan) if plan.objective == "step" else ()
    return (*headline(plan), stages(plan), *candidates(solution), *frontier(solution), *simple, *lines)


def candidates(solution: Solution) -> Report:
    """Every micro-batch count that was looked at, the chosen one marked."""
    if not solution.candidates:
        return ()
    time = fmt.time_unit(*(each.value for each in solution.candidates))
    rows = tuple(
        (
            each.schedule,
            fmt.count(each.micro_batches),
            fmt.count(each.micro_batch_size),
            time.show(each.value),
            time.show(each.bound if 0 < each.bound < math.inf else None),
            each.status,
        )
        for each in solution.candidates
    )
    marked = frozenset(n for n, each in enumerate(solution.candidates) if each.status == CHOSEN)
    columns = (
        Column("schedule", "text"),
        Column("micro-batches"),
        Column("of samples"),
        Column(f"{WHAT[solution.plan.objective]} {time.name}"),
        Column(f"bound {time.name}"),
        Column("status", "text"),
    )
    return (Sheet("candidates", columns, rows, marked),)


def frontier(solution: Solution) -> Report:
    """Money against step time: every plan that no other beats in both, the chosen one marked."""
    if not solution.frontier:
        return ()
    time = fmt.time_unit(*(each.step_s for each in solution.frontier))
    rows = tuple(
        (
            f"{1000 * each.money:.4g}", time.show(each.step_s), fmt.count(len(each.workers)), fmt.ranges(each.workers),
            CHOSEN if each.chosen else "",
        )
        for each in solution.frontier
    )  # fmt: skip
    marked = frozenset(n for n, each in enumerate(solution.frontier) if each.chosen)
    columns = (
        Column("per 1000 samples"),
        Column(f"step {time.name}"),
        Column("workers"),
        Column("which", "text"),
        Column("status", "text"),
    )
    return (Sheet("cost against step time", columns, rows, marked),)


def progress_text(progress: Progress, *, elapsed_s: float, time_limit: float) -> str:
    """One line on a search under way: the count at work, the incumbent, the bound, the gap, the time.

    Args:
        progress: What the search said last; it may be some seconds old.
        elapsed_s: Seconds since the start of the search.
        time_limit: Seconds after which it stops.
    """
    if progress.schedule == "workers":
        return _choices_text(progress, elapsed_s=elapsed_s, time_limit=time_limit)
    unit = fmt.time_unit(progress.incumbent_s, progress.bound_s)
    parts = [f"{progress.schedule}, {fmt.plural(progress.micro_batches, 'micro-batch')}"]
    parts.append(f"best {unit.text(progress.incumbent_s)}" if progress.incumbent_s is not None else "no plan yet")
    if 0 < progress.bound_s < math.inf:
        parts.append(f"bound {unit.text(progress.bound_s)}")
        if progress.incumbent_s:
            parts.append(f"gap {fmt.percent(max(0.0, 1 - progress.bound_s / progress.incumbent_s))}")
    parts.append(f"{progress.done} of {fmt.plural(progress.total, 'candidate')} decided")
    parts.append(f"{elapsed_s:.0f} s of {time_limit:.0f} s")
    return " · ".join(parts)


def _choices_text(progress: Progress, *, elapsed_s: float, time_limit: float) -> str:
    """The line of a search for the cheapest plan."""
    money = None if progress.incumbent_s is None else 1000 * progress.incumbent_s
    best = "no plan yet" if money is None else f"best {money:.4g} per 1000 samples"
    choices = f"{progress.done} of {fmt.plural(progress.total, 'choice')} of workers solved"
    spent = f"{elapsed_s:.0f} s of {time_limit:.0f} s"
    return " · ".join((best, f"bound {1000 * progress.bound_s:.4g}", choices, spent))
