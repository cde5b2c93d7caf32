"""Plans side by side: what each is predicted to do, and what moved relative to the first, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.location import Location
from assigner.plan import Plan
from assigner.report.plan import fullness, status
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Named:
    """A plan with the name under which it is shown."""

    name: str
    plan: Plan


@dataclass(frozen=True)
class Place:
    """Where a partition is under one plan, and whether it is rematerialised."""

    worker: str
    remat: bool


@dataclass(frozen=True)
class Change:
    """One partition under the baseline and under another plan."""

    partition: str
    before: Place
    after: Place

    @property
    def differs(self) -> bool:
        """True where the partition moved, or its rematerialisation changed."""
        return self.before != self.after


def places(plan: Plan) -> dict[str, Place]:
    """Every partition's place, in pipeline order."""
    return {
        name: Place(stage.worker, name in stage.rematerialise) for stage in plan.stages for name in stage.partitions
    }


def changes(baseline: Plan, other: Plan) -> tuple[Change, ...]:
    """All partitions in the baseline's order, with their place under both plans."""
    after = places(other)
    return tuple(Change(name, before, after[name]) for name, before in places(baseline).items())


def settings(plan: Plan) -> dict[str, str]:
    """What a plan decides beside the places of partitions, as text."""
    order = ", ".join(str(Location.parse(stage.worker).rank) for stage in plan.stages)
    depths = [fmt.NOTHING if stage.in_flight is None else str(stage.in_flight) for stage in plan.stages]
    return {
        "schedule": plan.schedule,
        "micro-batches": f"{plan.micro_batches} x {plan.micro_batch_size}",
        "order of ranks": order,
        "in flight": ", ".join(depths) if any(stage.in_flight for stage in plan.stages) else "default",
    }


def differ(plans: Sequence[Named]) -> bool:
    """True if any plan would run otherwise than the first: other places, remat, split, schedule, order or depth."""
    first = plans[0].plan
    return any(
        settings(each.plan) != settings(first) or any(change.differs for change in changes(first, each.plan))
        for each in plans[1:]
    )


def check_comparable(plans: Sequence[Named]) -> None:
    """Raise FormatError unless all plans are for one workload: same fingerprint, same partitions."""
    first = plans[0]
    for other in plans[1:]:
        if other.plan.workload.fingerprint != first.plan.workload.fingerprint:
            raise FormatError(
                f"{other.name} is for workload {_workload(other.plan)}, {first.name} for {_workload(first.plan)}",
                hint="compare plans of one workload; a changed model needs a new profile",
            )
        strange = set(other.plan.partitions) ^ set(first.plan.partitions)
        if strange:
            has, lacks = (first, other) if min(strange) in first.plan.placement else (other, first)
            raise FormatError(
                f"{has.name} places partition {min(strange)!r}, {lacks.name} does not",
                hint="compare plans that were solved from profiles of the same partitions",
            )


def _workload(plan: Plan) -> str:
    return f"{plan.workload.name!r} ({plan.workload.fingerprint[:15] or 'no fingerprint'})"


def comparison_report(plans: Sequence[Named], *, everything: bool = False) -> Report:
    """What `assigner compare` prints.

    Args:
        plans: The first is the baseline.
        everything: All partitions, not only those that changed.

    Raises:
        FormatError: the plans are not of one workload.
    """
    check_comparable(plans)
    missing = tuple(
        Line(f"{each.name} is not priced; `assigner simulate` predicts it", "warning")
        for each in plans
        if each.plan.predicted is None
    )
    moved = [part for each in plans[1:] for part in _moved(plans[0], each, everything=everything)]
    return (_figures(plans), *missing, *moved)


def _figures(plans: Sequence[Named]) -> Sheet:
    time = fmt.time_unit(*(each.plan.predicted.step_s for each in plans if each.plan.predicted))
    columns = (
        Column("plan", "text"),
        Column(f"step {time.name}"),
        Column("samples/s", rank=4),
        Column("speed-up"),
        Column("bubble %"),
        Column("workers"),
        Column("micro-batches"),
        Column("remat", rank=2),
        Column("memory %"),
        Column("transfer %", rank=1),
        Column("gap %", rank=3),
    )
    rows = tuple(_figures_row(each, plans[0], time) for each in plans)
    workload = plans[0].plan.workload
    return Sheet(f"plans for {workload.name}, batch of {workload.batch_size}", columns, rows)


def _figures_row(each: Named, baseline: Named, time: fmt.Unit) -> tuple[str, ...]:
    plan, predicted = each.plan, each.plan.predicted
    base = baseline.plan.predicted.step_s if baseline.plan.predicted else None
    step = predicted.step_s if predicted else None
    again = sum(len(stage.rematerialise) for stage in plan.stages)
    return (
        each.name + (" (baseline)" if each is baseline else ""),
        time.show(step),
        fmt.number(predicted.samples_per_s if predicted else None),
        fmt.ratio(fmt.against(base, step)),
        fmt.points(predicted.bubble_fraction if predicted else None),
        str(len(plan.workers)),
        f"{plan.micro_batches} x {plan.micro_batch_size}",
        f"{again} of {len(plan.partitions)}",
        fmt.points(memory_share(plan)),
        fmt.points(transfer_share(plan)),
        fmt.points(plan.solver.gap if plan.solver else None),
    )


def memory_share(plan: Plan) -> float | None:
    """The fullest worker's peak against its capacity."""
    return max(map(fullness, plan.predicted.workers), default=None) if plan.predicted else None


def transfer_share(plan: Plan) -> float | None:
    """The share of the workers' time in which they wait while a message is on its way."""
    if plan.predicted is None:
        return None
    waiting = sum(each.transfer_s for each in plan.predicted.workers)
    return fmt.against(waiting, len(plan.predicted.workers) * plan.predicted.step_s)


def _moved(baseline: Named, other: Named, *, everything: bool) -> Iterator[Sheet | Line]:
    found = changes(baseline.plan, other.plan)
    changed = [change for change in found if change.differs]
    before, after = settings(baseline.plan), settings(other.plan)
    title = f"{other.name} against {baseline.name}: "
    title += f"{len(changed)} of {fmt.plural(len(found), 'partition')} changed" if changed else "no partition moved"
    rows = [(what, before[what], after[what], "") for what in before if before[what] != after[what]]
    rows += [_change_row(run) for run in _runs(found if everything else changed)]
    if rows:
        columns = (Column("", "text"), Column("from", "text"), Column("to", "text"), Column("remat", "text"))
        yield Sheet(title, columns, tuple(rows))
    else:
        yield Line(f"{other.name} does the same as {baseline.name}")


def _runs(found: Sequence[Change]) -> list[list[Change]]:
    """Neighbouring partitions with the same change, together."""
    runs: list[list[Change]] = []
    for change in found:
        if runs and (runs[-1][-1].before, runs[-1][-1].after) == (change.before, change.after):
            runs[-1].append(change)
        else:
            runs.append([change])
    return runs


def _change_row(run: Sequence[Change]) -> tuple[str, str, str, str]:
    before, after = run[0].before, run[0].after
    moved = before.worker != after.worker
    stays = "stays on" if after.remat else ""
    remat = stays if before.remat == after.remat else "on" if after.remat else "off"
    names = fmt.ranges([change.partition for change in run])
    return names, before.worker, f"-> {after.worker}" if moved else "stays", remat


def comparison_data(plans: Sequence[Named]) -> dict[str, Any]:
    """The same for `--json`; errors as `comparison_report`."""
    check_comparable(plans)
    return {
        "kind": "comparison",
        "workload": plans[0].plan.workload.name,
        "baseline": plans[0].name,
        "differ": differ(plans),
        "plans": [_plan_data(each, plans[0]) for each in plans],
    }


def _plan_data(each: Named, baseline: Named) -> dict[str, Any]:
    plan, predicted = each.plan, each.plan.predicted
    base = baseline.plan.predicted
    before, after = settings(baseline.plan), settings(plan)
    return {
        "name": each.name,
        "step_s": predicted.step_s if predicted else None,
        "samples_per_s": predicted.samples_per_s if predicted else None,
        "speed_up": fmt.against(base.step_s, predicted.step_s) if base and predicted else None,
        "bubble_fraction": predicted.bubble_fraction if predicted else None,
        "workers": list(plan.workers),
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "rematerialised": sum(len(stage.rematerialise) for stage in plan.stages),
        "memory_share": memory_share(plan),
        "transfer_share": transfer_share(plan),
        "status": status(plan.solver) if plan.solver else None,
        "settings_changed": {what: [before[what], after[what]] for what in before if before[what] != after[what]},
        "partitions_changed": [
            {
                "partition": change.partition,
                "from": change.before.worker,
                "to": change.after.worker,
                "remat": [change.before.remat, change.after.remat],
            }
            for change in changes(baseline.plan, plan)
            if change.differs
        ],
    }
