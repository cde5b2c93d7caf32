"""A plan as the page shows it: priced anew, timed, with its memory over time and the runs that were traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan, Prediction, ProfileReference
from assigner.formats.profile import Profile
from assigner.formats.trace import Trace
from assigner.report.page.splits import Split, splits
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import Occupancy, memory_over_time
from assigner.schedule.simulate import Timeline, simulated, summary
from assigner.validation.checkedplan import checked_plan
from assigner.validation.comparison import Agreement, agree
from assigner.validation.steps import runs_by_plan

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
        as_run: The plan with the run's rematerialisation, where that is not the plan's own; None: it is.
    """

    name: str
    trace: Trace
    agreement: Agreement
    as_run: Shown | None = None


@dataclass(frozen=True)
class Shown:
    """One plan with all that is drawn of it.

    Args:
        name: Under which it is shown.
        plan: With the prediction and the name of the profile given, not its own; with the figures of its search
            (bound, candidates, what-ifs, baselines) as far as they hold for that.
        stored: As its file has it.
        profile: What prices it.
        cost: The profile's prices.
        timeline: The simulated step.
        memory: Of that, by worker.
        runs: Traced runs of it.
        notes: Why its figures are not those of its file, as `checked_plan` tells it.
    """

    name: str
    plan: Plan
    stored: Plan
    profile: Profile
    cost: CostModel
    timeline: Timeline
    memory: tuple[Occupancy, ...]
    runs: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> Prediction:
        """What the profile says of the plan."""
        assert self.plan.predicted is not None
        return self.plan.predicted

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The placement at each number of micro-batches."""
        return splits(self.plan, self.cost)


def shown(
    name: str,
    plan: Plan,
    profile: Profile,
    traces: Sequence[tuple[str, Trace]] = (),
    *,
    source: ProfileReference | None = None,
) -> Shown:
    """Price and time a plan.

    Args:
        name: Under which it is shown.
        plan: The plan.
        profile: The measurements.
        traces: Runs of the plan, each with its name.
        source: The profile's file; None: the one that the plan was solved from.

    Raises:
        FormatError: plan and profile do not fit together, or a trace is of another plan.
    """
    alone = _simulated(name, plan, profile, source or plan.profile)
    return replace(alone, runs=tuple(_run(alone, called, trace) for called, trace in traces))


def _simulated(name: str, plan: Plan, profile: Profile, source: ProfileReference | None) -> Shown:
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    own = source.sha256 == plan.profile.sha256 if source and plan.profile else None
    held, notes = checked_plan(plan, profile, own=own)
    now = replace(held, predicted=summary(timeline, cost), profile=source)
    return Shown(name, now, plan, profile, cost, timeline, memory_over_time(timeline, cost), notes=notes)


def _run(page: Shown, name: str, trace: Trace) -> Run:
    found = agree(page.plan, page.profile, trace)
    if trace.remat == "plan":
        return Run(name, trace, found)
    return Run(name, trace, found, _simulated(page.name, found.plan, page.profile, page.plan.profile))


def unlike_batches(pages: Sequence[Shown]) -> bool:
    """Whether the steps of plans are of different batches, so that only samples a second compare."""
    return len({each.plan.workload.batch_size for each in pages}) > 1


def runs_of(plans: Sequence[Named], traces: Sequence[tuple[str, Trace]]) -> list[list[tuple[str, Trace]]]:
    """The traces of each plan.

    Args:
        plans: In the page's order.
        traces: Each with its name.

    Raises:
        FormatError: a trace is a run of none of them.
    """
    mine = runs_by_plan([(each.name, each.plan) for each in plans], traces)
    by_name = dict(traces)
    return [[(name, by_name[name]) for name in mine[each.name].traces] if each.name in mine else [] for each in plans]
