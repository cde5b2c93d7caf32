"""A plan as the page shows it: priced anew, timed, with its memory over time and the runs that were traced.

Of its search the page says the bound, where nothing on the page contradicts it, and what is left out. A search looks at
the plans that its options allow (so many workers, such schedules), with the measurements that it had: its bound says
nothing of other options. What no longer holds of a plan at all, `checked_plan` has taken from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.formats.plan import Plan, ProfileReference
from assigner.formats.profile import Profile
from assigner.formats.trace import Trace
from assigner.report.comparison import Named
from assigner.report.page.splits import Split, splits
from assigner.report.plan import proven_gap
from assigner.report.sheet import Line
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import Occupancy, memory_over_time
from assigner.schedule.simulate import Timeline, simulated, summary
from assigner.validation.checkedplan import checked_plan
from assigner.validation.comparison import Agreement, agree
from assigner.validation.steps import runs_by_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.prediction import Prediction


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


@dataclass(frozen=True, kw_only=True)
class Shown(Named):
    """One plan with all that is drawn of it.

    Args:
        plan: With the prediction and the name of the profile given, not its own; with the figures of its search
            (bound, candidates, what-ifs, baselines) as far as they hold for that.
        profile: What prices it.
        stored: As its file has it.
        cost: The profile's prices.
        timeline: The simulated step.
        memory: Of that, by worker.
        runs: Traced runs of it.
    """

    profile: Profile
    stored: Plan
    cost: CostModel
    timeline: Timeline
    memory: tuple[Occupancy, ...]
    runs: tuple[Run, ...] = ()

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
    return Shown(
        name, now, profile=profile, notes=notes, stored=plan, cost=cost, timeline=timeline,
        memory=memory_over_time(timeline, cost),
    )  # fmt: skip


def _run(page: Shown, name: str, trace: Trace) -> Run:
    found = agree(page.plan, page.profile, trace)
    if trace.remat == "plan":
        return Run(name, trace, found)
    return Run(name, trace, found, _simulated(page.name, found.plan, page.profile, page.plan.profile))


def unlike_batches(pages: Sequence[Shown]) -> bool:
    """Whether the steps of plans are of different batches, so that only samples a second compare."""
    return len({each.plan.workload.batch_size for each in pages}) > 1


def bound_s(pages: Sequence[Shown], page: Shown) -> float | None:
    """No step that the plan's search could have found is shorter; None: nothing is proven, or a shown one is faster."""
    solver = page.plan.solver
    if solver is None or proven_gap(page.plan) is None or solver.options.get("robust"):
        return None  # a robust bound is of the slow end of the measurements
    batch = page.plan.workload.batch_size
    fastest = min(each.predicted.step_s for each in pages if each.plan.workload.batch_size == batch)
    return None if fastest < solver.bound_s * (1 - fmt.SHOWN) else solver.bound_s


def beaten(pages: Sequence[Shown], page: Shown) -> bool:
    """Whether a shown plan is faster than the bound of this one's search, so that its options left that plan out."""
    return bound_s([page], page) is not None and bound_s(pages, page) is None


def changed(page: Shown) -> tuple[Line, ...]:
    """Why a plan's figures are not those of its file, and how to find again what was left out for that."""
    if not page.notes:
        return ()
    lost = page.stored.solver is not None and page.plan.solver is None
    source = page.plan.profile.path if page.plan.profile else "PROFILE"
    again = f"; solve again to have it: assigner solve {source} -o PLAN" if lost else ""
    said = "; ".join(page.notes) + again
    return (Line(f"{said[0].upper()}{said[1:]}.", "warning"),)


def runs_of(plans: Sequence[Named], traces: Sequence[tuple[str, Trace]]) -> list[list[tuple[str, Trace]]]:
    """The traces of each plan, each with its name.

    Raises:
        FormatError: a trace is a run of none of them.
    """
    mine = runs_by_plan([(each.name, each.plan) for each in plans], traces)
    by_name = dict(traces)
    return [[(file, by_name[file]) for steps in mine.get(each.name, ()) for file in steps.traces] for each in plans]
