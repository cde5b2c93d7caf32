"""A profile on one screen: workers, partitions with their times, and the links."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.cost import CostModel, Output, message_s
from assigner.document import encode
from assigner.profile import Measurement
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.profile import Link, Profile

MATRIX_LIMIT = 12
"""Workers up to which the links are a matrix; above it they are summed up by kind of worker."""
ROW_LIMIT = 40
"""Rows of a table above which only the heaviest partitions and the slowest links are listed."""


@dataclass(frozen=True)
class Group:
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


def groups(profile: Profile) -> tuple[Group, ...]:
    """The partitions of a profile, like ones together, in the order in which they run."""
    cost = CostModel(profile)
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in profile.order:
        part = profile.partition[name]
        points = tuple(tuple(cost.measurements(name, worker)) for worker in profile.worker)
        found[part.kind, part.parameter_bytes, points].append(name)
    return tuple(Group(tuple(names), _timings(profile, cost, names[0])) for names in found.values())


def _timings(profile: Profile, cost: CostModel, partition: str) -> tuple[Timing, ...]:
    shared: dict[tuple[Measurement, ...], list[str]] = defaultdict(list)
    for worker in profile.worker:
        shared[tuple(cost.measurements(partition, worker))].append(worker)
    timings = []
    for points, workers in shared.items():
        feasible = [point for point in points if point.infeasible is None]
        best = max(feasible, key=lambda point: point.micro_batch, default=None)
        why = next((point.infeasible for point in points if point.infeasible), "not measured")
        timings.append(Timing(tuple(workers), best, "" if best else why))
    return tuple(timings)


def profile_report(profile: Profile) -> Report:
    """What `assigner show PROFILE` prints."""
    workload = profile.workload
    head = [f"profile of {workload.name}", f"batch of {workload.batch_size}", workload.dtype, workload.optimizer]
    made = [text for text in (profile.created_at, profile.tool_version) if text]
    lines = [Line(" · ".join(text for text in head if text), "strong")]
    lines += [Line("measured " + " by assigner ".join(made))] if profile.created_at else []
    return (
        *lines,
        _workers(profile),
        _partitions(profile),
        *_links(profile),
        *(Line(f"warning: {text}", "warning") for text in profile.warnings),
    )


def _workers(profile: Profile) -> Sheet:
    memory = fmt.byte_unit(*(worker.memory_bytes for worker in profile.workers))
    return Sheet(
        fmt.plural(len(profile.workers), "worker"),
        (
            Column("worker", "name"),
            Column("kind", "text"),
            Column("host", "text"),
            Column("threads", rank=1),
            Column(f"memory {memory.name}", rank=2),
            Column(f"capacity {memory.name}", rank=3),
            Column(f"for tensors {memory.name}"),
        ),
        tuple(
            (
                worker.name,
                worker.kind,
                worker.host,
                fmt.count(worker.threads),
                memory.show(worker.memory_bytes),
                memory.show(worker.capacity_bytes),
                memory.show(worker.tensor_bytes),
            )
            for worker in profile.workers
        ),
    )


def _partitions(profile: Profile) -> Sheet:
    whole = groups(profile)
    found = _heaviest(whole)
    measured = [row.measured for group in found for row in group.rows if row.measured]
    time = fmt.time_unit(*(point.forward_s for point in measured), *(point.backward_s for point in measured))
    weight = fmt.byte_unit(*(part.parameter_bytes for part in profile.partitions))
    kept = fmt.byte_unit(*(point.activation_bytes for point in measured))
    longest = max((point.forward_s + point.backward_s for point in measured), default=0.0)
    rows = []
    for group in found:
        head = (fmt.ranges(group.partitions), weight.show(profile.partition[group.partitions[0]].parameter_bytes))
        for n, row in enumerate(group.rows):
            rows.append(
                (*(head if n == 0 else ("", "")), _who(profile, row.workers), *_cells(row, time, kept, longest))
            )
    batches = {point.micro_batch for point in measured}
    note = f" at micro-batch {batches.pop()}" if len(batches) == 1 else " at the largest micro-batch measured"
    title = f"{fmt.plural(len(profile.partitions), 'partition')}, times of one{note}"
    if len(found) < len(whole):
        title += f"; the {len(found)} heaviest rows of {len(whole)}, --json has all"
    return Sheet(
        title,
        (
            Column("partitions", "text"),
            Column(f"parameters {weight.name}", rank=2),
            Column("on", "text"),
            Column("micro-batch", rank=4),
            Column(f"forward {time.name}"),
            Column(f"backward {time.name}"),
            Column("± %", rank=1),
            Column(f"kept {kept.name}", rank=3),
            Column("together", "name"),
        ),
        tuple(rows),
    )


def _heaviest(whole: tuple[Group, ...]) -> tuple[Group, ...]:
    """As many groups as fit `ROW_LIMIT`, those that take longest, in the order in which they run."""
    if sum(len(group.rows) for group in whole) <= ROW_LIMIT:
        return whole
    keep = set(sorted(whole, key=_weight, reverse=True)[: max(1, ROW_LIMIT // max(len(group.rows) for group in whole))])
    return tuple(group for group in whole if group in keep)


def _weight(group: Group) -> float:
    """Seconds of a group's forwards and backwards where they take longest."""
    times = (row.measured.forward_s + row.measured.backward_s for row in group.rows if row.measured)
    return len(group.partitions) * max(times, default=0.0)


def _cells(row: Timing, time: fmt.Unit, kept: fmt.Unit, longest: float) -> tuple[str, ...]:
    point = row.measured
    if point is None:
        return (fmt.NOTHING,) * 5 + (row.why,)
    share = (point.forward_s + point.backward_s) / longest if longest else 0.0
    return (
        fmt.count(point.micro_batch),
        time.show(point.forward_s),
        time.show(point.backward_s),
        fmt.points(point.spread),
        kept.show(point.activation_bytes),
        fmt.bar(share, rest=" "),
    )


def _who(profile: Profile, workers: Iterable[str]) -> str:
    """Workers that share a measurement: their kind where that says enough, else their names."""
    names = list(workers)
    if len(names) == 1:
        return names[0]
    kinds = dict.fromkeys(profile.worker[name].kind for name in names)
    return f"{', '.join(kinds)} (x{len(names)})"


def message_bytes(profile: Profile) -> float:
    """The message at which links are compared: the median output at the largest measured micro-batch, in bytes."""
    cost = CostModel(profile)
    batch = max(point.micro_batch for point in profile.measurements)
    sizes = sorted(cost.output_bytes(Output(edge.source, edge.output), batch) for edge in profile.edges)
    return sizes[len(sizes) // 2] if sizes else 2.0**20


def _links(profile: Profile) -> Report:
    if len(profile.workers) == 1:
        return ()
    if not profile.links:
        return (Line("no links: no two workers can talk, so a plan has one worker", "warning"),)
    size = message_bytes(profile)
    if len(profile.workers) > MATRIX_LIMIT:
        return (_links_by_kind(profile, size),)
    rate = fmt.rate_unit(*(_rate(link, size) for link in profile.links))
    wait = fmt.time_unit(*(link.points[0].seconds for link in profile.links))
    smallest = fmt.size(min(link.points[0].bytes for link in profile.links))
    return (
        _matrix(
            profile, f"links: {rate.name} in messages of {fmt.size(size)}", lambda link: rate.show(_rate(link, size))
        ),
        _matrix(
            profile,
            f"links: latency in {wait.name}, messages of {smallest}",
            lambda link: wait.show(link.points[0].seconds),
        ),
    )


def _matrix(profile: Profile, title: str, cell: Callable[[Link], str]) -> Sheet:
    """One row per sender, one column per receiver; `-` where the two cannot talk."""
    found = {(link.source, link.target): link for link in profile.links}
    names = tuple(profile.worker)
    rows = tuple(
        (source, *(cell(found[source, target]) if (source, target) in found else fmt.NOTHING for target in names))
        for source in names
    )
    columns = (Column("from", "name"), *(Column(f"to {profile.worker[name].rank}") for name in names))
    return Sheet(title, columns, rows)


def _links_by_kind(profile: Profile, size: float) -> Sheet:
    """Links between kinds of workers: how many, and their range."""
    pairs: dict[tuple[str, str], list[Link]] = defaultdict(list)
    for link in profile.links:
        pairs[profile.worker[link.source].kind, profile.worker[link.target].kind].append(link)
    rate = fmt.rate_unit(*(_rate(link, size) for link in profile.links))
    wait = fmt.time_unit(*(link.points[0].seconds for link in profile.links))
    rows = []
    slowest = sorted(pairs.items(), key=lambda pair: min(_rate(link, size) for link in pair[1]))
    for (source, target), links in slowest[:ROW_LIMIT]:
        rates = sorted(_rate(link, size) for link in links)
        latency = sorted(link.points[0].seconds for link in links)
        rows.append(
            (
                source, target, fmt.count(len(links)), rate.show(rates[0]), rate.show(rates[len(rates) // 2]),
                rate.show(rates[-1]), wait.show(latency[len(latency) // 2]),
            )
        )  # fmt: skip
    columns = (
        Column("from", "text"), Column("to", "text"), Column("links"), Column(f"slowest {rate.name}"),
        Column(f"median {rate.name}"), Column(f"fastest {rate.name}", rank=1), Column(f"latency {wait.name}"),
    )  # fmt: skip
    title = f"links by kind of worker, slowest first, in messages of {fmt.size(size)}"
    if len(pairs) > ROW_LIMIT:
        title += f"; {ROW_LIMIT} of {len(pairs)} pairs, --json has all"
    return Sheet(title, columns, tuple(rows))


def _rate(link: Link, size: float) -> float:
    """Bytes per second of one message of `size` bytes."""
    return size / max(message_s(link.points, size), 1e-12)


def profile_data(profile: Profile) -> dict[str, Any]:
    """The same for `--json`: seconds and bytes, unrounded."""
    size = message_bytes(profile)
    return {
        "kind": "profile",
        "workload": encode(profile.workload),
        "created_at": profile.created_at,
        "tool_version": profile.tool_version,
        "workers": [
            {**encode(worker), "capacity_bytes": worker.capacity_bytes, "tensor_bytes": worker.tensor_bytes}
            for worker in profile.workers
        ],
        "partitions": [
            {
                "partitions": list(group.partitions),
                "count": len(group.partitions),
                "parameter_bytes": profile.partition[group.partitions[0]].parameter_bytes,
                "timings": [_timing_data(row) for row in group.rows],
            }
            for group in groups(profile)
        ],
        "message_bytes": size,
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "backend": link.backend,
                "bytes_per_s": _rate(link, size),
                "latency_s": link.points[0].seconds,
                "sender_busy": link.sender_busy,
                "receiver_busy": link.receiver_busy,
            }
            for link in profile.links
        ],
        "warnings": list(profile.warnings),
    }


def _timing_data(row: Timing) -> dict[str, Any]:
    if row.measured is None:
        return {"workers": list(row.workers), "infeasible": row.why}
    fields = (
        "micro_batch", "forward_s", "backward_s", "recompute_s", "update_s", "activation_bytes", "workspace_bytes",
        "spread", "update_spread",
    )  # fmt: skip
    return {"workers": list(row.workers), **{name: getattr(row.measured, name) for name in fields}}
