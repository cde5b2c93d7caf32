"""A profile on one screen: workers, partitions, links, and how sure all of it is; and what `check` says of a model."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.links import collectives, collectives_data, links, message_bytes, rate
from assigner.report.partitions import groups, partitions, partitions_data
from assigner.report.sheet import Cell, Column, Line, Report, Sheet
from assigner.report.spread import spread_data, warnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile, Verification, Worker
    from assigner.report.sheet import Report

WORKER_LIMIT = 16
"""Workers above which those of a host and kind are one row."""
KIND_LIMIT = 64
"""Rows of kinds that are listed."""
_LONG = 48
"""Characters up to which the ranks of a row are all named."""


def profile_report(profile: Profile, *, everything: bool = False) -> Report:
    """What `assigner show PROFILE` prints; `everything`: every worker, partition, link and warning, however many."""
    workload = profile.workload
    head = [f"profile of {workload.name}", f"batch of {workload.batch_size}", workload.dtype, workload.optimizer]
    made = [text for text in (profile.created_at, profile.tool_version) if text]
    lines = [Line(" · ".join(text for text in head if text), "strong")]
    lines += [Line("measured " + " by assigner ".join(made))] if profile.created_at else []
    lines += [Line(verification_text(profile.verification))] if profile.verification else []
    found = groups(profile)
    return (
        *lines,
        _workers(profile, everything=everything),
        partitions(profile, found, everything=everything),
        *links(profile, everything=everything),
        *collectives(profile, everything=everything),
        *warnings(profile, found, everything=everything),
    )


def _workers(profile: Profile, *, everything: bool) -> Sheet:
    """One row per worker; of many, one per host and kind, or per kind, with the least memory of each."""
    together = [[worker] for worker in profile.workers]
    title = fmt.plural(len(profile.workers), "worker")
    if len(together) > WORKER_LIMIT and not everything:
        together = _alike(profile)
        title += ", those of a kind together with the least memory of one (-v lists all)"
    if len(together) > KIND_LIMIT and not everything:
        title += f"; {KIND_LIMIT} of {len(together):,} kinds"
        together = together[:KIND_LIMIT]
    memory = fmt.byte_unit(*(worker.memory_bytes for worker in profile.workers))
    return Sheet.of(title, [_worker_row(each, memory) for each in together])


def _worker_row(workers: Sequence[Worker], memory: fmt.Unit) -> Sequence[Cell]:
    ranks = fmt.ranges([str(worker.rank) for worker in workers])
    if len(ranks) > _LONG:
        ranks = f"{workers[0].rank} ... {workers[-1].rank} ({len(workers):,})"
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    threads = dict.fromkeys(fmt.count(worker.threads) for worker in workers)
    return (
        (Column("worker", "name"), workers[0].name if len(workers) == 1 else f"worker:{ranks}"),
        (Column("kind", "text"), workers[0].kind),
        (Column("host", "text"), hosts[0] if len(hosts) == 1 else fmt.plural(len(hosts), "host")),
        (Column("threads", rank=1), ", ".join(threads)),
        (Column(f"memory {memory.name}", rank=2), memory.show(min(worker.memory_bytes for worker in workers))),
        (Column(f"capacity {memory.name}", rank=3), memory.show(min(worker.capacity_bytes for worker in workers))),
        (Column(f"for tensors {memory.name}"), memory.show(min(worker.tensor_bytes for worker in workers))),
    )


def _alike(profile: Profile) -> list[list[Worker]]:
    """Workers of one host and kind; where that is as many rows, those of one kind wherever they are."""
    by_host: dict[tuple[str, str], list[Worker]] = defaultdict(list)
    by_kind: dict[str, list[Worker]] = defaultdict(list)
    for worker in profile.workers:
        by_host[worker.host, worker.kind].append(worker)
        by_kind[worker.kind].append(worker)
    return list(by_host.values()) if len(by_host) <= WORKER_LIMIT else list(by_kind.values())


def profile_data(profile: Profile) -> dict[str, Any]:
    """The same for `--json`: seconds and bytes, unrounded."""
    size, found = message_bytes(profile), groups(profile)
    return {
        "kind": "profile",
        "workload": encode(profile.workload),
        "created_at": profile.created_at,
        "tool_version": profile.tool_version,
        "workers": [
            {**encode(worker), "capacity_bytes": worker.capacity_bytes, "tensor_bytes": worker.tensor_bytes}
            for worker in profile.workers
        ],
        "partitions": partitions_data(profile, found),
        "message_bytes": size,
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "backend": link.backend,
                "bytes_per_s": rate(link, size),
                "latency_s": link.points[0].seconds,
                "sender_busy": link.sender_busy,
                "receiver_busy": link.receiver_busy,
                "sender_s": link.sender_s,
                "receiver_s": link.receiver_s,
            }
            for link in profile.links
        ],
        "wires": encode(profile.wires),
        "collectives": collectives_data(profile),
        "warnings": list(profile.warnings),
        "verification": encode(profile.verification),
        "spread": spread_data(profile, found),
    }


def verification_report(found: Verification, entry: str) -> Report:
    """What `assigner check` prints of the workload `entry`."""
    return (
        Line(f"{entry}: {verification_text(found)}", "strong"),
        Line(_way(found)),
        *(Line(f"caution: {text}", "warning") for text in found.cautions),
        *(Line(f"caution: several micro-batches: {text}", "warning") for text in found.per_micro_batch),
    )


def verification_text(found: Verification) -> str:
    """The result and what it took, in one line."""
    took = f"checked in {fmt.seconds(found.seconds)}"
    if found.result == "uncertain":
        return f"the partitions cannot be compared with the model ({took})"
    precision = "to the last bit" if found.exact else "within rounding"
    return f"the partitions compute what the model computes, {precision} ({took})"


def _way(found: Verification) -> str:
    rows = f"{fmt.plural(found.rows, 'row')} in {fmt.plural(found.micro_batches, 'micro-batch')}"
    parts = fmt.plural(found.partitions, "partition")
    if found.way == "pieces":
        return f"{parts}, one at a time for lack of memory: forwards of {rows}"
    if not found.trained:
        return f"{parts} apart from each other: outputs of {rows}"
    return f"{parts} apart from each other: two steps and an evaluation of {rows}, with and without rematerialisation"


def verification_data(found: Verification, entry: str) -> dict[str, Any]:
    """The same for `--json`; seconds are unrounded."""
    return {"kind": "check", "workload": entry, **encode(found)}
