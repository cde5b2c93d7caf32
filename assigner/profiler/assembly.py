"""Put the ranks' reports together into one profile."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from assigner.formats.document import now
from assigner.formats.merging import updated
from assigner.formats.profile import (
    Collective,
    Link,
    Measurement,
    Partition,
    Profile,
    Verification,
    Wire,
    WireLink,
    Worker,
    WorkloadReference,
)
from assigner.formats.profilewarnings import other_warnings, with_warnings
from assigner.machine.reference import ReferenceTimes
from assigner.model.marking.modules import batch_norms
from assigner.model.plainvalues import dtype_name
from assigner.profiler.collectives import CollectiveSweep
from assigner.profiler.contention import SharedWire
from assigner.profiler.host import HostFacts, allocator_share
from assigner.profiler.links import LinkSweep, with_unmeasured
from assigner.profiler.partitionbench import state_bytes
from assigner.runtime.ranks.process import float32_precision
from assigner.runtime.stages.replicas import obstacles
from assigner.runtime.update.optimizer import built_optimizer, stand_ins
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.marking import PartitionGraph, Piece
    from assigner.model.workload import Workload


@dataclass(frozen=True)
class RankReport:
    """What one rank measured.

    Args:
        facts: Its worker.
        measurements: Its partitions, one of each kind.
        optimizer_bytes: Optimizer state by kind of partition.
        sweeps: The links that start at it.
        collectives: The all-reduces of which it is the first rank.
        wires: Those that links were found to share, of the first rank.
        notes: What a reader of the profile should know.
        reference: How fast its worker did fixed pieces of work, the mean of before and after.
    """

    facts: HostFacts
    measurements: tuple[Measurement, ...]
    optimizer_bytes: dict[str, int]
    sweeps: tuple[LinkSweep, ...]
    notes: tuple[str, ...] = ()
    reference: ReferenceTimes | None = None
    collectives: tuple[CollectiveSweep, ...] = ()
    wires: tuple[SharedWire, ...] = ()


def assemble(
    workload: Workload, graph: PartitionGraph, reports: Sequence[RankReport], *, entry: str, reserve: float
) -> Profile:
    """One profile from all ranks' reports, in the order of the ranks."""
    tensors = graph.deferred.tensors()
    sweeps = [sweep for report in reports for sweep in report.sweeps]
    alone = obstacles(workload, graph)
    profile = Profile(
        created_at=now(),
        tool_version=__version__,
        environment=_environment(workload, [report.facts for report in reports]),
        workload=workload_reference(workload, graph, entry),
        workers=_workers(reports, reserve),
        links=_links(reports, with_unmeasured(sweeps, [report.facts for report in reports])),
        wires=_wires(reports),
        collectives=_collectives(reports),
        partitions=tuple(
            replace(_partition(piece, tensors, reports), one_worker=alone.get(piece.name)) for piece in graph.pieces
        ),
        edges=graph.edges,
        ties=graph.ties,
        measurements=tuple(each for report in reports for each in report.measurements),
    )
    return with_warnings(profile, [note for report in reports for note in report.notes])


def workload_reference(workload: Workload, graph: PartitionGraph, entry: str) -> WorkloadReference:
    """What a profile says of its workload."""
    name = workload.name or entry.rpartition(".py:")[0].rpartition("/")[2]
    dtype = dtype_name(main_dtype(graph.deferred.tensors()))
    optimizer = optimizer_name(workload, graph)
    norms, inputs = batch_norms(graph.deferred.model), graph.domain.example.noted
    return WorkloadReference(
        name, entry, graph.fingerprint, workload.batch_size, dtype, optimizer, workload.max_micro_batches,
        workload.min_rows, () if norms is None else (norms,), inputs,
    )  # fmt: skip


def verified(profile: Profile, verification: Verification) -> Profile:
    """The profile with how its partitions were compared with the model, and what that showed of micro-batches."""
    workload = replace(profile.workload, per_micro_batch=verification.per_micro_batch)
    partitions = tuple(
        replace(each, one_worker="its buffers move with every micro-batch")
        if each.name in verification.moving and each.one_worker is None
        else each
        for each in profile.partitions
    )
    new = replace(profile, workload=workload, partitions=partitions, verification=verification)
    return with_warnings(new, other_warnings(profile))


def renew(old: Profile, reports: Sequence[RankReport]) -> Profile:
    """An earlier profile of the same workers with what was measured again in place of what it had.

    Where links were, those that nobody has measured get the medians of their classes anew.
    """
    sweeps = [sweep for report in reports for sweep in report.sweeps]
    if sweeps:
        known = {(sweep.source, sweep.target) for sweep in sweeps}
        kept = [_as_sweep(old, link) for link in old.links if any(point.samples for point in link.points)]
        there = [sweep for sweep in kept if (sweep.source, sweep.target) not in known]
        kept_ways = {(sweep.source, sweep.target) for sweep in there}
        whole = with_unmeasured([*sweeps, *there], [report.facts for report in reports])
        sweeps = [sweep for sweep in whole if (sweep.source, sweep.target) not in kept_ways]
    return updated(
        replace(old, workers=tuple(_looked_at_again(old, reports))),
        measurements=[each for report in reports for each in report.measurements],
        links=_links(reports, sweeps),
        wires=_wires(reports),
        collectives=_collectives(reports),
        notes=[note for report in reports for note in report.notes],
        created_at=now(),
    )


def _looked_at_again(old: Profile, reports: Sequence[RankReport]) -> Iterator[Worker]:
    """The workers, with new reference times where all points are new: the others' times are of the earlier machine."""
    for worker, report in zip(old.workers, reports, strict=True):
        points = {(each.partition, each.micro_batch) for each in old.measurements if each.worker == worker.name}
        again = {(each.partition, each.micro_batch) for each in report.measurements}
        yield replace(worker, reference=report.reference) if points and points <= again else worker


def _workers(reports: Sequence[RankReport], reserve: float) -> tuple[Worker, ...]:
    hosts = _host_names([report.facts for report in reports])
    return tuple(
        Worker(
            name, report.facts.kind, host, report.facts.device, report.facts.memory_bytes, report.facts.threads,
            int(reserve * report.facts.memory_bytes), allocator_share=allocator_share(report.facts.device),
            reference=report.reference,
        )
        for name, host, report in zip(_names(reports), hosts, reports, strict=True)
    )  # fmt: skip


def _names(reports: Sequence[RankReport]) -> list[str]:
    return [f"worker:{rank}/{report.facts.device}" for rank, report in enumerate(reports)]


def _partition(piece: Piece, tensors: dict[str, torch.Tensor], reports: Sequence[RankReport]) -> Partition:
    parameters, gradients, buffers = state_bytes(piece, tensors)
    known = (report.optimizer_bytes[piece.kind] for report in reports if piece.kind in report.optimizer_bytes)
    return Partition(
        piece.name, piece.kind, parameters, gradients, next(known, 0), buffers,
        piece.mark.pin, piece.mark.colocate, piece.mark.apart, piece.mark.rematerialise,
    )  # fmt: skip


def _links(reports: Sequence[RankReport], sweeps: Sequence[LinkSweep]) -> tuple[Link, ...]:
    names = _names(reports)
    return tuple(_link(names, sweep) for sweep in sweeps)


def _as_sweep(profile: Profile, link: Link) -> LinkSweep:
    source, target = (profile.worker[name].rank for name in (link.source, link.target))
    busy = link.sender_busy, link.receiver_busy, link.starved, link.backend
    return LinkSweep(source, target, link.points, *busy, link.sender_s, link.receiver_s)


def _host_names(facts: Sequence[HostFacts]) -> list[str]:
    """Each rank's host; nodes of the launcher that bear one name are told apart by their number."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each.host, set()).add(each.node)
    return [each.host if len(nodes[each.host]) == 1 else f"{each.host}-{each.node}" for each in facts]


def _link(names: Sequence[str], sweep: LinkSweep) -> Link:
    ends = names[sweep.source], names[sweep.target]
    busy = sweep.sender_busy, sweep.receiver_busy, sweep.starved, sweep.sender_s, sweep.receiver_s
    return Link(*ends, sweep.points, sweep.backend, *busy)


def _wires(reports: Sequence[RankReport]) -> tuple[Wire, ...]:
    names = _names(reports)
    return tuple(
        Wire(tuple(WireLink(names[source], names[target]) for source, target in wire.links), wire.slower)
        for report in reports
        for wire in report.wires
    )


def _collectives(reports: Sequence[RankReport]) -> tuple[Collective, ...]:
    """The smallest sets first."""
    names = _names(reports)
    found = sorted(
        (each for report in reports for each in report.collectives), key=lambda each: (len(each.ranks), each.ranks)
    )
    return tuple(
        Collective(tuple(names[rank] for rank in each.ranks), each.points, each.backend, each.busy, each.starved)
        for each in found
    )


def _environment(workload: Workload, facts: Sequence[HostFacts]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "interface": ", ".join(sorted({each.interface for each in facts})),
        "float32": float32_precision(),
        "autocast": workload.autocast or "",
        "compile": str(workload.compile or ""),
    }


def main_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The type that most parameters have."""
    count = Counter(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    return count.most_common(1)[0][0] if count else torch.float32


def optimizer_name(workload: Workload, graph: PartitionGraph) -> str:
    """The class of the workload's optimizer."""
    made, _ = built_optimizer(workload, stand_ins(graph.deferred.model.named_parameters()), {})
    return type(made).__name__
