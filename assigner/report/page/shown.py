"""A plan as the page shows it: priced anew, timed, with its memory over time, other splits, and traced runs of it.

Of its search the page says the bound, where nothing on the page contradicts it, and what is left out. A search looks at
the plans that its options allow (so many workers, such schedules), with the measurements that it had: its bound says
nothing of other options. What no longer holds of a plan at all, `checked_plan` has taken from it.

How the step time changes with the number of micro-batches: the placement is priced at each that the batch allows.
Partitions, rematerialisation and schedule stay as they are, so this is no search; what the solver found under another
number, with another placement, stands beside it where the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.formats.fineness import rows_each
from assigner.formats.orders import INPUT
from assigner.formats.plan import Plan, ProfileReference
from assigner.formats.profile import Profile
from assigner.formats.trace import Trace
from assigner.report.comparison import Named
from assigner.report.plan import proven_gap
from assigner.report.sheet import Line
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import Occupancy, memory_over_time
from assigner.schedule.simulate import Timeline, simulated, step_s, summary, worker_memory
from assigner.validation.checkedplan import checked_plan
from assigner.validation.comparison import Agreement, agree
from assigner.validation.steps import runs_by_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.prediction import Prediction

MOST = 512
"""Micro-batches above which no plan is priced."""
IMPLAUSIBLE = "not plausible: extrapolated, it costs less a sample than the sizes that were measured"


@dataclass(frozen=True)
class Run:
    """A traced run of a plan, beside what was predicted.

    `as_run` is the plan with the run's rematerialisation, where that is not the plan's own; None: it is.
    """

    name: str
    trace: Trace
    agreement: Agreement
    as_run: Shown | None = None


@dataclass(frozen=True, kw_only=True)
class Shown(Named):
    """One plan with all that is drawn of it, priced by the profile.

    The plan has the prediction and the name of the profile given, not its own, and the figures of its search (bound,
    candidates, what-ifs, baselines) as far as they hold for that.
    """

    profile: Profile  # what prices it
    stored: Plan  # as its file has it
    cost: CostModel
    timeline: Timeline  # the simulated step
    memory: tuple[Occupancy, ...]  # of that, by worker
    runs: tuple[Run, ...] = ()  # traced runs of it

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
    """Price and time a plan by a profile, beside traces of its runs, each with its name.

    `source` is the profile's file; None: the one that the plan was solved from.

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
    is_planned = trace.remat == "plan"
    other = None if is_planned else _simulated(page.name, found.plan, page.profile, page.plan.profile)
    return Run(name, trace, found, other)


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


@dataclass(frozen=True)
class Split:
    """The placement at one number of micro-batches.

    `step_s` is None, and `why` says so, where the profile cannot price it; `fullest` is the worker with its peak and
    its capacity in bytes. `measured`: the size was; else the cost model draws a line through sizes that were.
    """

    micro_batches: int
    step_s: float | None
    fullest: tuple[str, float, float] | None
    measured: bool
    why: str = ""

    @property
    def fits(self) -> bool:
        """True if every worker's peak is within its capacity."""
        return self.fullest is not None and self.fullest[1] <= self.fullest[2]


def splits(plan: Plan, cost: CostModel) -> tuple[Split, ...]:
    """The plan's placement at every number of micro-batches that its batch may be cut into, fewest first."""
    batch = plan.workload.batch_size
    counts = dict.fromkeys(-(-batch // size) for size in range(batch, 0, -1))
    most = min(MOST, plan.workload.fineness.most(batch))
    return tuple(_priced(plan, cost, count) for count in counts if count <= most or count == plan.micro_batches)


def _priced(plan: Plan, cost: CostModel, count: int) -> Split:
    size = -(-plan.workload.batch_size // count)
    held = [(name, worker) for stage in plan.stages for worker in stage.workers for name in stage.partitions]
    obstacles = (cost.obstacle(name, worker, size) for name, worker in held)
    why = next((each for each in obstacles if each is not None), None)
    if why is None and not cost.is_plausible(size):
        why = IMPLAUSIBLE
    if plan.orders and why is None:
        why = _not_listed(plan, cost, count, size)
    measured = all(any(point.micro_batch == size for point in cost.measurements(*pair)) for pair in held)
    if why is not None:
        return Split(count, None, None, measured, why)
    other, has = plan.cut(count, size, batch_size=plan.workload.batch_size), cost.profile.worker
    peaks = [(name, worker_memory(cost, other, name).total, has[name].capacity_bytes) for name in plan.workers]
    fullest = max(peaks, key=lambda peak: peak[1] / peak[2] if peak[2] else float("inf"))
    return Split(count, step_s(other, cost), fullest, measured)


def _not_listed(plan: Plan, cost: CostModel, count: int, size: int) -> str | None:
    """Why listed orders cannot be priced at a number of micro-batches; None: they can."""
    if count > plan.micro_batches:
        return f"the plan lists its orders for {plan.micro_batches} micro-batches"
    halved = {(step.stage, worker) for worker, steps in plan.listed.items() for step in steps if step.letter == INPUT}
    prices = (cost.partition(name, worker, size) for n, worker in halved for name in plan.stages[n].partitions)
    return "the parts of backwards were not measured there" if any(each.parts is None for each in prices) else None


def splits_figures(page: Shown, bound_s: float | None) -> dict[str, Any]:
    """The same for the chart, with the candidates of the solver where they are step times, and the search's bound."""
    batch = page.plan.workload.batch_size
    looked_at = page.plan.candidates if page.plan.objective == "step" else ()
    return {
        "micro_batches": page.plan.micro_batches,
        "placement": [
            {
                "micro_batches": each.micro_batches, "rows": rows_each(batch, each.micro_batches),
                "step_s": each.step_s, "fits": each.fits, "measured": each.measured, "why": each.why,
            }
            for each in page.splits
        ],
        "candidates": [{**encode(each), "rows": rows_each(batch, each.micro_batches)} for each in looked_at],
        "bound_s": bound_s,
    }  # fmt: skip
