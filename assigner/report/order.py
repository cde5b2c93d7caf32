"""What `assigner schedule` prints: what every worker does in which order, and the step that this makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.formats.document import encode
from assigner.report.clock import clock_data, clock_table, legend
from assigner.report.plan import describe_prediction, title
from assigner.report.prediction import fit, fit_data, stages_held
from assigner.report.sheet import Column, Line, Report, Sheet, with_hosts
from assigner.report.timeline import timeline
from assigner.schedule.orders import in_flight, listed

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction
    from assigner.formats.profile import Profile
    from assigner.validation.spans import Spans

_MOST = 48
"""Steps of a worker above which those in the middle are left out."""


def order_report(
    plan: Plan, profile: Profile, now: Prediction, spans: Spans, *, width: int, everything: bool
) -> Report:
    """The order of a plan whose program runs.

    Args:
        plan: Of any schedule.
        profile: It knows which stage needs which, and the hosts.
        now: What the simulator says of the plan.
        spans: The step, action by action.
        width: Of the terminal.
        everything: All steps, however many.
    """
    orders = listed(plan).orders
    rows = tuple(
        (
            worker, *stages_held(plan, worker), _shown(order, everything=everything),
        )
        for worker, order in orders.items()
    )  # fmt: skip
    columns = (
        Column("worker", "name"), Column("stages", "name", rank=2), Column("in flight", rank=3),
        Column("stage, what, micro-batch", "text"),
    )  # fmt: skip
    said = f"order ({legend(plan)})"
    parts = (
        title(plan),
        Line(f"predicted: {describe_prediction(now)}"), Sheet(said, columns, rows),
        *clock_table(plan, profile, everything=everything), *timeline([spans], profile, width=width), fit(now),
    )  # fmt: skip
    return with_hosts(parts, profile)


def _shown(order: str, *, everything: bool) -> str:
    steps = order.split()
    if everything or len(steps) <= _MOST:
        return order
    ends = _MOST // 2
    middle = f"... ({len(steps) - 2 * ends} more: -v lists all) ..."
    return " ".join([*steps[:ends], middle, *steps[-ends:]])


def order_data(plan: Plan, profile: Profile, now: Prediction) -> dict[str, Any]:
    """The same for `--json`; `orders` is what a file for `--orders` holds."""
    return {
        "kind": "schedule",
        "schedule": plan.schedule,
        "orders": listed(plan).orders,
        "in_flight": {worker: {n: in_flight(plan, n, worker) for n in held} for worker, held in plan.held.items()},
        "predicted": encode(now),
        "clock": clock_data(plan, profile),
        **fit_data(now),
    }
