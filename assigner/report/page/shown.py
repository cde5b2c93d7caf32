"""A plan as the page shows it: priced anew, timed, with its memory over time and the runs that were traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.agreement import Agreement, agree
from assigner.cost import CostModel
from assigner.occupancy import Occupancy, memory_over_time
from assigner.plan import Plan, Prediction
from assigner.profile import Profile
from assigner.report.measured import assigned
from assigner.simulate import Timeline, simulated, summary
from assigner.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.comparison import Named


@dataclass(frozen=True)
class Run:
    """A traced run of a plan.

    Args:
        name: Of its file.
        trace: What happened.
        agreement: Beside what was predicted.
    """

    name: str
    trace: Trace
    agreement: Agreement


@dataclass(frozen=True)
class Shown:
    """One plan with all that is drawn of it.

    Args:
        name: Under which it is shown.
        plan: With the prediction of the profile given, not its own.
        stored: The prediction that its file has.
        profile: What prices it.
        cost: The profile's prices.
        timeline: The simulated step.
        memory: Of that, by worker.
        runs: Traced runs of it.
    """

    name: str
    plan: Plan
    stored: Prediction | None
    profile: Profile
    cost: CostModel
    timeline: Timeline
    memory: tuple[Occupancy, ...]
    runs: tuple[Run, ...] = ()

    @property
    def predicted(self) -> Prediction:
        """What the profile says of the plan."""
        assert self.plan.predicted is not None
        return self.plan.predicted


def shown(name: str, plan: Plan, profile: Profile, traces: Sequence[tuple[str, Trace]] = ()) -> Shown:
    """Price and time a plan.

    Args:
        name: Under which it is shown.
        plan: The plan.
        profile: The measurements.
        traces: Runs of the plan, each with its name.

    Raises:
        FormatError: plan and profile do not fit together, or a trace is of another plan.
    """
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    now = replace(plan, predicted=summary(timeline, cost))
    runs = tuple(Run(called, trace, agree(plan, profile, trace)) for called, trace in traces)
    return Shown(name, now, plan.predicted, profile, cost, timeline, memory_over_time(timeline, cost), runs)


def runs_of(plans: Sequence[Named], traces: Sequence[tuple[str, Trace]]) -> list[list[tuple[str, Trace]]]:
    """The traces of each plan.

    Args:
        plans: In the page's order.
        traces: Each with its name.

    Raises:
        FormatError: a trace is a run of none of them.
    """
    mine = assigned([(each.name, each.plan) for each in plans], traces)
    by_name = dict(traces)
    return [[(name, by_name[name]) for name in mine[each.name].traces] if each.name in mine else [] for each in plans]
