"""What one change would bring: another micro-batch count, one more worker; and which changes give a plan at all."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.sheet import Column, Line, Part, Report, Sheet
from assigner.settings import flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from assigner.errors import NoPlanError
    from assigner.formats.plan import Plan
    from assigner.formats.solverreport import WhatIf

SOLVERS = ("HiGHS", "CBC")
"""Who made a plan by a search; others are simple placements."""
TO_THIS = "to this plan"
"""Heads a column of steps, each as a multiple of the plan's own: below 1 it is faster, above 1 slower."""
WHAT = {"step": "step", "throughput": "steady batch", "latency": "forward", "cost": "step"}
"""What a plan's value is of, by objective."""
CHEAPEST = " (cheapest)"
"""Marks the way out that changes least: flags before training, and training before machines."""


def what_if(plan: Plan) -> Report:
    """The plan's what-ifs as a table, the one that gains most said in a cell; nothing where it has none."""
    if not plan.what_if:
        return ()
    step = plan.predicted_step_s
    time = fmt.time_unit(*(each.step_s for each in plan.what_if), step)
    best = min((each.step_s for each in plan.what_if if each.step_s is not None), default=None)
    helps = best is not None and step is not None and best < step * (1 - fmt.SHOWN)
    marked = frozenset(n for n, each in enumerate(plan.what_if) if helps and each.step_s == best)
    rows = [
        (
            (Column("change", "text"), each.what + (" (gains most)" if n in marked else "")),
            (Column(f"step {time.name}"), time.show(each.step_s)),
            (Column(TO_THIS), fmt.ratio(fmt.against(each.step_s, step))),
            (Column(f"bound {time.name}"), _bound(each, time)),
        )
        for n, each in enumerate(plan.what_if)
    ]
    now = "nothing priced" if step is None else f"this plan's {time.text(step)}"
    return (Sheet.of(f"what if: the best step after one change, against {now}", rows, marked),)


def what_if_hint(plan: Plan, *, source: Path | None = None) -> Report:
    """How to get the what-ifs of a plan that has none and could have some: a solved one, for a short step.

    `source` is the profile that it was solved from, as seen from here; None: it is not known where it is.
    """
    solver = plan.solver
    if plan.what_if or solver is None or plan.objective != "step":
        return ()
    told = solver.options
    complete = bool(told.get("what_if")) and not told.get("what_if_left_out")
    is_searched = solver.found_by or solver.name in SOLVERS
    if complete or told.get("robust") or not is_searched:  # the command would bring no more, or be refused
        return ()
    profile = "PROFILE" if source is None else shlex.quote(str(source))
    command = " ".join(["assigner solve", profile, "-o PLAN", *solve_flags(told), "--what-if"])
    return (Line(f"what more workers or wider links would bring: {command}"),)


def proven(change: WhatIf) -> bool:
    """Whether no step after the change can be shorter than the one that was found."""
    step, bound = change.step_s, change.bound_s
    return step is not None and bound is not None and bound >= step * (1 - fmt.SHOWN)


def _bound(change: WhatIf, time: fmt.Unit) -> str:
    if change.bound_s is None:
        return "nothing fits" if change.step_s is None else fmt.NOTHING
    return "proven" if proven(change) else time.show(change.bound_s)


def what_if_data(plan: Plan) -> list[dict[str, Any]]:
    """The same for `--json`."""
    step = plan.predicted_step_s
    return [
        {**encode(each), "speed_up": fmt.against(step, each.step_s), "proven": proven(each)} for each in plan.what_if
    ]


def solve_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of `assigner solve`, with values for a shell, that ask again for what a plan was asked for.

    The options are those of a plan's solver report; what `solve` does not know is left out.
    """
    from assigner.solver.problem.options import SolveOptions

    return tuple(f"{flag} {shlex.quote(value)}" for flag, value in flags(SolveOptions, options))


def ways_out_report(error: NoPlanError) -> Report:
    """What stands below the error: the changes with which there is a plan, and what was not tried; empty: neither.

    Beside each stands the objective's value that was found with it; beside one that changes the objective nothing, as
    that is no value to compare with the others.
    """
    parts: list[Part] = []
    if error.ways_out:
        objective = error.ways_out[0].objective
        title, header, show = _value_words(objective, [way.value for way in error.ways_out])
        rows = [
            (
                (Column("what changes", "text"), way.what + (CHEAPEST if n == 0 else "")),
                (Column("how", "text"), way.how),
                (Column(header), show(way.value) if way.objective == objective else fmt.NOTHING),
            )
            for n, way in enumerate(error.ways_out)
        ]
        parts.append(Sheet.of(f"with one of these changes there is a plan, {title}", rows, frozenset({0})))
    if error.untried:
        parts.append(Line(f"not known, for the time was over: {', '.join(error.untried)}", "warning"))
    return tuple(parts)


def _value_words(objective: str, values: Sequence[float]) -> tuple[str, str, Callable[[float], str]]:
    """Of values of an objective: what the best plan is then, the heading of their column, and how one is shown."""
    if objective == "cost":
        return "at this cost or less", "per 1000 samples", lambda value: f"{1000 * value:.4g}"
    time, what = fmt.time_unit(*values), WHAT[objective]
    return f"with this {what} or a shorter one", f"{what} {time.name}", time.show
