"""A profile's partitions by kind: what one costs on every worker, and what share of the model's time they are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.profile import Measurement
from assigner.report.sheet import Column, Sheet, foremost
from assigner.schedule.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.formats.profile import Profile

ROW_LIMIT = 24
"""Rows above which only the partitions that take longest are listed, and of one only the workers that are slowest."""


@dataclass(frozen=True)
class PartitionGroup:
    """Partitions that are alike: one kind, one size, and the same measurements on every worker."""

    partitions: tuple[str, ...]
    rows: tuple[Timing, ...]


@dataclass(frozen=True)
class Timing:
    """What one partition of a group costs on workers that share a measurement.

    `measured` is the largest micro-batch that was measured; None: it cannot run there, and `why` says so.
    """

    workers: tuple[str, ...]
    measured: Measurement | None
    why: str = ""

    @property
    def sample_s(self) -> float:
        """Forward and backward of one sample, in seconds, so that sizes compare; nothing where it cannot run."""
        point = self.measured
        return 0.0 if point is None else (point.forward_s + point.backward_s) / point.micro_batch


def groups(profile: Profile) -> tuple[PartitionGroup, ...]:
    """The partitions of a profile, like ones together, in the order in which they run."""
    cost = CostModel(profile)
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in profile.order:
        part = profile.partition[name]
        own = tuple(tuple(cost.measurements(name, worker)) for worker in profile.worker)
        found[part.kind, part.parameter_bytes, own].append(name)
    return tuple(PartitionGroup(tuple(names), _timings(profile.worker, own)) for (*_, own), names in found.items())


def _timings(workers: Iterable[str], own: Iterable[tuple[Measurement, ...]]) -> tuple[Timing, ...]:
    shared: dict[tuple[Measurement, ...], list[str]] = defaultdict(list)
    for worker, points in zip(workers, own, strict=True):
        shared[points].append(worker)
    timings = []
    for points, alike in shared.items():
        feasible = [point for point in points if point.infeasible is None]
        best = max(feasible, key=lambda point: point.micro_batch, default=None)
        why = next((point.infeasible for point in points if point.infeasible), "not measured")
        timings.append(Timing(tuple(alike), best, "" if best else why))
    return tuple(timings)


def partitions(profile: Profile, whole: Sequence[PartitionGroup], *, everything: bool) -> Sheet:
    """One row per group of partitions (`groups`) and worker; the bar compares what one takes there.

    Of many groups those that take longest, unless everything is asked for.
    """
    found = whole if everything else _heaviest(whole)
    measured = [row.measured for group in found for row in group.rows if row.measured]
    time = fmt.time_unit(*(point.forward_s for point in measured), *(point.backward_s for point in measured))
    weight = fmt.byte_unit(*(profile.partition[group.partitions[0]].parameter_bytes for group in found))
    kept = fmt.byte_unit(*(point.activation_bytes for point in measured))
    longest = max((row.sample_s for group in found for row in group.rows), default=0.0)
    totals = model_s(whole)
    rows, left_out = [], 0
    for group in found:
        shown = foremost(group.rows, None if everything else ROW_LIMIT, lambda row: -row.sample_s)
        left_out += len(group.rows) - len(shown)
        head = (fmt.ranges(group.partitions), weight.show(profile.partition[group.partitions[0]].parameter_bytes))
        for n, row in enumerate(shown):
            share = group_share(group, row, totals[row.workers[0]])
            cells = _cells(row, share, (time, kept), longest)
            rows.append((*(head if n == 0 else ("", "")), _who(profile, row.workers), *cells))
    columns = (
        Column("partitions", "text"),
        Column(f"parameters {weight.name}", rank=5),
        Column("on", "text", least=32),
        Column("micro-batch", rank=6),
        Column(f"forward {time.name}"),
        Column(f"backward {time.name}"),
        Column("± %", rank=2),
        Column(f"kept {kept.name}", rank=4),
        Column("of all %", rank=3),
        Column("one of them", "name", rank=1),
    )
    more = f"; rows of the slowest workers, {left_out:,} more with -v" if left_out else ""
    return Sheet(_title(profile, whole, found, measured) + more, columns, tuple(rows))


def _title(
    profile: Profile, whole: Sequence[PartitionGroup], found: Sequence[PartitionGroup], measured: Sequence[Measurement]
) -> str:
    batches = {point.micro_batch for point in measured}
    at = f"micro-batch {batches.pop()}" if len(batches) == 1 else "the largest micro-batch measured, bars of one sample"
    title = f"{fmt.plural(len(profile.partitions), 'partition')}, times of one at {at}"
    if len(found) == len(whole):
        return title
    totals = model_s(whole)
    shares = dict.fromkeys(totals, 0.0)
    for group in found:
        for row in group.rows:
            for worker in row.workers:
                shares[worker] += group_share(group, row, totals[worker])
    share = max(shares.values())
    return (
        f"{title}; the {len(found)} of {len(whole)} kinds that take longest, {fmt.percent(share)} of all (-v lists all)"
    )


def model_s(whole: Sequence[PartitionGroup]) -> Mapping[str, float]:
    """Seconds of one forward and backward of the whole model for one sample, by worker."""
    totals: dict[str, float] = defaultdict(float)
    for group in whole:
        for row in group.rows:
            for worker in row.workers:
                totals[worker] += len(group.partitions) * row.sample_s
    return totals


def group_share(group: PartitionGroup, row: Timing, total_s: float) -> float:
    """What all partitions of a group are of a worker's time for the model (`model_s`), of a row its first worker's."""
    return len(group.partitions) * row.sample_s / total_s if total_s else 0.0


def _heaviest(whole: Sequence[PartitionGroup]) -> Sequence[PartitionGroup]:
    """As many groups as fit `ROW_LIMIT`, those that take longest, in the order in which they run."""
    if sum(len(group.rows) for group in whole) <= ROW_LIMIT:
        return whole
    longest = [len(group.partitions) * max((row.sample_s for row in group.rows), default=0.0) for group in whole]
    ordered = sorted(range(len(whole)), key=lambda n: -longest[n])
    kept: list[int] = []
    rows = 0
    for n in ordered:
        rows += len(whole[n].rows)
        if rows > ROW_LIMIT and kept:
            break
        kept.append(n)
    return [whole[n] for n in sorted(kept)]


def _cells(row: Timing, share: float, units: tuple[fmt.Unit, fmt.Unit], longest: float) -> tuple[str, ...]:
    time, kept = units
    point = row.measured
    if point is None:
        return (fmt.NOTHING,) * 6 + (row.why,)
    return (
        fmt.count(point.micro_batch),
        time.show(point.forward_s),
        time.show(point.backward_s),
        fmt.spread_points(point.spread),
        kept.show(point.activation_bytes),
        fmt.points(share),
        fmt.bar(row.sample_s / longest if longest else 0.0, rest=" "),
    )


def _who(profile: Profile, workers: Iterable[str]) -> str:
    """Workers that share a measurement: their kind where that says enough, else their names."""
    names = list(workers)
    if len(names) == 1:
        return names[0]
    kinds = dict.fromkeys(profile.worker[name].kind for name in names)
    return f"{', '.join(kinds)} (x{len(names)})"


def partitions_data(profile: Profile, whole: Sequence[PartitionGroup]) -> list[dict[str, Any]]:
    """The same for `--json`: every group, seconds and bytes."""
    totals = model_s(whole)
    return [
        {
            "partitions": list(group.partitions),
            "count": len(group.partitions),
            "parameter_bytes": profile.partition[group.partitions[0]].parameter_bytes,
            "timings": [
                _timing_data(row) | {"share": group_share(group, row, totals[row.workers[0]])} for row in group.rows
            ],
        }
        for group in whole
    ]


def _timing_data(row: Timing) -> dict[str, Any]:
    if row.measured is None:
        return {"workers": list(row.workers), "infeasible": row.why}
    fields = (
        "micro_batch", "forward_s", "backward_s", "recompute_s", "update_s", "activation_bytes", "workspace_bytes",
        "spread", "update_spread",
    )  # fmt: skip
    return {"workers": list(row.workers), **{name: getattr(row.measured, name) for name in fields}}
