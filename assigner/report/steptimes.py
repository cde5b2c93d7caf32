"""A run's step beside its plan's prediction, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.trace import check_same_plan
from assigner.report.agreement import step_text
from assigner.validation.comparison import Compared
from assigner.validation.observed import Samples

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.launch.steptimes import StepTimes


def step_times_text(found: StepTimes, plan: Plan) -> str:
    """What `assigner run` says at its end.

    Args:
        found: The steps of the run.
        plan: What it was started with; without a prediction where none holds.
    """
    took = Samples(found.seconds)
    if plan.predicted is not None and (why := _other_run(found, plan)) is None:
        return step_text(Compared(plan.predicted.step_s, took.median_s, took.iqr_s, len(took.seconds)))
    measured = f"{fmt.seconds(took.median_s)} measured (median of {fmt.plural(len(took.seconds), 'step')})"
    return f"step: {measured}; {'the plan has no prediction' if plan.predicted is None else why}"


def _other_run(found: StepTimes, plan: Plan) -> str | None:
    """Why a plan's prediction is not of these steps; None: it is."""
    if found.remat != "plan":
        return f"the run rematerialised by {found.remat!r}, not as the plan says: its prediction is of another run"
    try:
        check_same_plan(found.plan, plan)
    except FormatError:
        return "the script ran another plan than it was started with: the prediction is of that one"
    return None
