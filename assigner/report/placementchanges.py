"""What other plans do otherwise than the baseline: settings, places of partitions, rematerialisation."""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner import formatting as fmt
from assigner.formats.fineness import cut_text
from assigner.formats.orders import written_order
from assigner.location import rank_of
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.schedule.orders import in_flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan

DETAILED = 2
"""Plans besides the baseline up to which each has a table of its own; more of them share one."""


class PartitionPlace(NamedTuple):
    """Where a partition is under one plan, and whether it is rematerialised."""

    workers: tuple[str, ...]
    remat: bool

    @property
    def where(self) -> str:
        """Its workers, as they are told."""
        return " + ".join(self.workers)


Move = tuple[PartitionPlace, PartitionPlace]
"""Where a partition is under the baseline and under another plan; the same place: it has not moved."""


def places(plan: Plan) -> dict[str, PartitionPlace]:
    """Every partition's place, in pipeline order."""
    return {
        name: PartitionPlace(stage.workers, name in stage.rematerialise)
        for stage in plan.stages
        for name in stage.partitions
    }


def both_places(baseline: Plan, other: Plan) -> dict[str, Move]:
    """All partitions in the baseline's order, with their place under both plans."""
    after = places(other)
    return {name: (before, after[name]) for name, before in places(baseline).items()}


def moves(baseline: Plan, other: Plan) -> dict[str, Move]:
    """Those that moved, or whose rematerialisation changed."""
    return {name: move for name, move in both_places(baseline, other).items() if move[0] != move[1]}


def settings(plan: Plan) -> dict[str, str]:
    """What a plan decides beside the places of partitions, as text."""
    shares = ["+".join(str(each.micro_batches) for each in stage.replicas) for stage in plan.stages if stage.replicas]
    updates = [
        "+".join(str(len(each.updates or ())) for each in stage.replicas) for stage in plan.stages if stage.is_divided
    ]
    depths = [
        "+".join(str(in_flight(plan, n, worker)) for worker in stage.workers) for n, stage in enumerate(plan.stages)
    ]
    return {
        "batch": str(plan.workload.batch_size),
        "schedule": plan.schedule,
        "micro-batches": cut_text(plan.workload.batch_size, plan.micro_batches),
        "order of ranks": fmt.ranges(["+".join(str(rank_of(each)) for each in stage.workers) for stage in plan.stages]),
        "shares of replicas": ", ".join(shares) or "none",
        "updates of replicas": ", ".join(updates) or "everything",
        "in flight": "all" if plan.schedule in ("gpipe", "interleaved") else ", ".join(depths),
        "orders": _orders(plan),
    }


def _orders(plan: Plan) -> str:
    """A short word that differs where listed orders do."""
    if not plan.orders:
        return "the schedule's"
    text = "\n".join(f"{worker} {written_order(steps)}" for worker, steps in sorted(plan.listed.items()))
    return f"listed {hashlib.sha256(text.encode()).hexdigest()[:6]}"


def changed_settings(baseline: Plan, other: Plan) -> dict[str, tuple[str, str]]:
    """The settings that differ: from, to."""
    before, after = settings(baseline), settings(other)
    return {what: (before[what], after[what]) for what in before if before[what] != after[what]}


def same(baseline: Plan, other: Plan) -> bool:
    """Whether two plans run alike: places, remat, split, schedule, order and depth."""
    return not changed_settings(baseline, other) and not moves(baseline, other)


def placement_changes(plans: Sequence[tuple[str, Plan]], *, everything: bool = False) -> Report:
    """What every other plan changes against the first: the partitions that changed, or everything."""
    if len(plans) - 1 > DETAILED:
        return (_summary(plans), *_matrix(plans, everything=everything))
    return tuple(_detailed(plans[0], other, everything=everything) for other in plans[1:])


def _detailed(baseline: tuple[str, Plan], other: tuple[str, Plan], *, everything: bool) -> Sheet | Line:
    """One plan against the baseline: a row for each setting and each range of partitions."""
    found, changed = both_places(baseline[1], other[1]), moves(baseline[1], other[1])
    otherwise = changed_settings(baseline[1], other[1])
    rows = [(what, before, f"-> {after}", "") for what, (before, after) in otherwise.items()]
    shown = found if everything else changed
    rows += [_change_row(list(run), move) for move, run in groupby(shown, key=shown.__getitem__)]
    if not rows:
        return Line(f"{other[0]} does the same as {baseline[0]}")
    title = f"{other[0]} against {baseline[0]}: "
    title += f"{len(changed)} of {fmt.plural(len(found), 'partition')} changed" if changed else "no partition moved"
    columns = (Column("", "text"), Column("from", "text"), Column("to", "text"), Column("remat", "name"))
    width = 4 if any(row[3] for row in rows) else 3
    return Sheet(title, columns[:width], tuple(row[:width] for row in rows))


def _change_row(names: Sequence[str], move: Move) -> tuple[str, str, str, str]:
    before, after = move
    stays = "stays on" if after.remat else ""
    remat = stays if before.remat == after.remat else "off -> on" if after.remat else "on -> off"
    to = f"-> {after.where}" if before.workers != after.workers else "stays"
    return fmt.ranges(names), before.where, to, remat


def _summary(plans: Sequence[tuple[str, Plan]]) -> Sheet:
    """One row per plan: how much of it is otherwise."""
    base = plans[0][1]
    rows = []
    for n, (name, plan) in enumerate(plans[1:], start=2):
        found = both_places(base, plan)
        elsewhere = sum(before.workers != after.workers for before, after in found.values())
        on, off = (sum(after.remat == now != before.remat for before, after in found.values()) for now in (True, False))
        remat = ", ".join(text for text, some in ((f"{on} on", on), (f"{off} off", off)) if some)
        told = (f"{what} {after}" for what, (_, after) in changed_settings(base, plan).items())
        rows.append(
            (
                (Column("#"), str(n)),
                (Column("plan", "text"), name),
                (Column("moved"), f"{elsewhere} of {len(found)}"),
                (Column("remat", "name"), remat or fmt.NOTHING),
                (Column("other settings", "text"), "; ".join(told) or fmt.NOTHING),
            )
        )
    return Sheet.of(f"changes against {plans[0][0]}", rows)


def _matrix(plans: Sequence[tuple[str, Plan]], *, everything: bool) -> Report:
    """One row per range of partitions, one column per plan."""
    found = [places(plan) for _, plan in plans]
    label = _labels(found)
    rows = []
    for alike, run in groupby(found[0], key=lambda name: tuple(each[name] for each in found)):
        before, *after = alike
        if everything or any(place != before for place in after):
            cells = ("=" if place == before else _cell(place, label) for place in after)
            rows.append((fmt.ranges(list(run)), _cell(before, label), *cells))
    if not rows:
        return (Line(f"no partition is elsewhere than under {plans[0][0]}"),)
    columns = (Column("partitions", "text", least=16), *(Column(f"#{n}", "name") for n in range(1, len(plans) + 1)))
    legend = "rank of its worker, R: rematerialised, =: as under #1"
    return (Sheet(f"where each partition is ({legend})", columns, tuple(rows)),)


def _cell(place: PartitionPlace, label: dict[str, str]) -> str:
    return "+".join(label[worker] for worker in place.workers) + ("R" if place.remat else "")


def _labels(found: Sequence[dict[str, PartitionPlace]]) -> dict[str, str]:
    """Workers by their ranks; by their names where two devices have one rank."""
    workers = list(dict.fromkeys(worker for each in found for place in each.values() for worker in place.workers))
    ranks = {worker: str(rank_of(worker)) for worker in workers}
    return ranks if len(set(ranks.values())) == len(workers) else {worker: worker for worker in workers}


def placement_changes_data(baseline: Plan, other: Plan) -> dict[str, Any]:
    """The same for `--json`, of one plan: every changed setting and partition."""
    return {
        "settings_changed": {what: list(pair) for what, pair in changed_settings(baseline, other).items()},
        "partitions_changed": [
            {"partition": name, "from": before.where, "to": after.where, "remat": [before.remat, after.remat]}
            for name, (before, after) in moves(baseline, other).items()
        ],
    }
