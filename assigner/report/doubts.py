"""What makes a plan's figures doubtful, each in a sentence: its profile, and how the plan goes beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.clock import is_long
from assigner.report.sheet import Line, Report
from assigner.report.spread import doubt
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import sustained_s
from assigner.solver.baselines import TITLES

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

_BEHIND = 0.01
"""A schedule that stays behind the steady state by a smaller share is not worth a word."""
_SUSTAINED = 3
"""So many times as long as a look at a step takes one at the steps that tell what is sustained."""


def doubts(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """The sentences; none of a plan that nothing is wrong with. What only its profile can tell needs that."""
    found = (
        None if profile is None else doubt(profile), _crowded(plan, profile), _extrapolated(plan, profile),
        _sustained(plan, profile),
    )  # fmt: skip
    return tuple(text for text in found if text)


def doubt_lines(plan: Plan, profile: Profile | None) -> Report:
    """The same, as lines of a report."""
    return tuple(Line(f"warning: {text}", "warning") for text in doubts(plan, profile))


def _crowded(plan: Plan, profile: Profile | None) -> str | None:
    """Whether one worker by itself may be faster than the plan, on cores that it shared while it was timed."""
    step, name = plan.predicted_step_s, TITLES["single"]
    alone = next((each.step_s for each in plan.baselines if each.name == name), None)
    slower = max((each.slower for each in (profile.workers if profile is not None else ())), default=1.0)
    if step is None or alone is None or len(plan.workers) == 1 or slower == 1 or alone / slower >= step:
        return None
    return (
        f"where others leave it their cores, the {name} may take as little as {fmt.seconds(alone / slower)},"
        f" not {fmt.seconds(alone)}: less than this plan (solve --baseline single makes that plan, bench runs both)"
    )


def _extrapolated(plan: Plan, profile: Profile | None) -> str | None:
    """Whether the plan's micro-batches are larger than all that were measured."""
    measured = () if profile is None else profile.measurements
    largest = max((each.micro_batch for each in measured if each.infeasible is None), default=plan.micro_batch_size)
    if plan.micro_batch_size <= largest:
        return None
    return (
        f"micro-batches of {plan.micro_batch_size:,} are {plan.micro_batch_size / largest:.3g} times"
        f" the largest that were measured ({largest:,}): what they take is extrapolated, and may be far off (assigner"
        " profile --micro-batches)"
    )


def _sustained(plan: Plan, profile: Profile | None) -> str | None:
    """How far the plan's own schedule stays behind the steady state, if it does; not told of the longest steps."""
    if plan.objective != "throughput" or plan.solver is None or profile is None or plan.orders:
        return None
    if not plan.solver.objective_s or is_long(plan, times=_SUSTAINED):
        return None
    seconds = plan.micro_batches * sustained_s(plan, CostModel(profile))
    more = seconds / plan.solver.objective_s - 1
    if more < _BEHIND:
        return None
    why = "its forwards wait for no backwards" if plan.schedule == "gpipe" else "its warm-ups are short for its wires"
    return (
        f"in a long run of its {plan.schedule} one more batch takes {fmt.seconds(seconds)},"
        f" {fmt.percent(more)} more than in the steady state: {why}"
    )
