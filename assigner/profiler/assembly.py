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
    Worker,
    WorkloadReference,
)
from assigner.formats.profilewarnings import other_warnings, with_warnings
from assigner.location import rank_of
from assigner.machine.reference import ReferenceTimes
from assigner.model.marking.modules import batch_norms
from assigner.model.plainvalues import dtype_name
from assigner.profiler.host import HostFacts, allocator_share, worker_names
from assigner.profiler.links import with_unmeasured
from assigner.profiler.partitionbench import state_bytes
from assigner.runtime.ranks.process import float32_precision
from assigner.runtime.stages.replicas import obstacles
from assigner.runtime.update.building import StandInParameters, built_optimizer
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.marking import PartitionGraph, Piece
    from assigner.model.workload import Workload


@dataclass(frozen=True)
class RankReport:
    """What one rank measured, with the links and the all-reduces of which it is the first rank.

    `optimizer_bytes` is by kind of partition; `reference` is how fast its worker did fixed pieces of work, the mean of
    before and after; the first rank has the wires.
    """

    facts: HostFacts
    measurements: tuple[Measurement, ...]
    optimizer_bytes: dict[str, int]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    reference: ReferenceTimes | None = None
    collectives: tuple[Collective, ...] = ()
    wires: tuple[Wire, ...] = ()


def assemble(
    workload: Workload, graph: PartitionGraph, reports: Sequence[RankReport], *, entry: str, reserve: float
) -> Profile:
    """One profile from all ranks' reports, in the order of the ranks."""
    tensors = graph.deferred.tensors()
    links = [link for report in reports for link in report.links]
    alone = obstacles(workload, graph)
    profile = Profile(
        created_at=now(),
        tool_version=__version__,
        environment=_environment(workload, [report.facts for report in reports]),
        workload=workload_reference(workload, graph, entry),
        workers=_workers(reports, reserve),
        links=tuple(with_unmeasured(links, [report.facts for report in reports])),
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
    links = [link for report in reports for link in report.links]
    if links:
        again = {(link.source, link.target) for link in links}
        measured = [link for link in old.links if any(point.samples for point in link.points)]
        kept = {(link.source, link.target): link for link in measured if (link.source, link.target) not in again}
        whole = with_unmeasured([*links, *kept.values()], [report.facts for report in reports])
        links = [link for link in whole if (link.source, link.target) not in kept]
    return updated(
        replace(old, workers=tuple(_looked_at_again(old, reports))),
        measurements=[each for report in reports for each in report.measurements],
        links=links,
        wires=_wires(reports),
        collectives=_collectives(reports),
        notes=[note for report in reports for note in report.notes],
        created_at=now(),
    )


def _looked_at_again(old: Profile, reports: Sequence[RankReport]) -> Iterator[Worker]:
    """The workers, with what was seen of the machine where all points are new: the others' are of the earlier one."""
    for worker, report in zip(old.workers, reports, strict=True):
        points = {(each.partition, each.micro_batch) for each in old.measurements if each.worker == worker.name}
        again = {(each.partition, each.micro_batch) for each in report.measurements}
        all_new = points and points <= again
        yield replace(worker, reference=report.reference, slower=report.facts.slower) if all_new else worker


def _workers(reports: Sequence[RankReport], reserve: float) -> tuple[Worker, ...]:
    facts = [report.facts for report in reports]
    hosts = _host_names(facts)
    return tuple(
        Worker(
            name, report.facts.kind, host, report.facts.device, report.facts.memory_bytes, report.facts.threads,
            int(reserve * report.facts.memory_bytes), allocator_share=allocator_share(report.facts.device),
            reference=report.reference, slower=report.facts.slower,
        )
        for name, host, report in zip(worker_names(facts), hosts, reports, strict=True)
    )  # fmt: skip


def _partition(piece: Piece, tensors: dict[str, torch.Tensor], reports: Sequence[RankReport]) -> Partition:
    parameters, gradients, buffers = state_bytes(piece, tensors)
    known = (report.optimizer_bytes[piece.kind] for report in reports if piece.kind in report.optimizer_bytes)
    return Partition(
        piece.name, piece.kind, parameters, gradients, next(known, 0), buffers,
        piece.mark.pin, piece.mark.colocate, piece.mark.apart, piece.mark.rematerialise,
    )  # fmt: skip


def _host_names(facts: Sequence[HostFacts]) -> list[str]:
    """Each rank's host; nodes of the launcher that bear one name are told apart by their number."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each.host, set()).add(each.node)
    return [each.host if len(nodes[each.host]) == 1 else f"{each.host}-{each.node}" for each in facts]


def _wires(reports: Sequence[RankReport]) -> tuple[Wire, ...]:
    return tuple(wire for report in reports for wire in report.wires)


def _collectives(reports: Sequence[RankReport]) -> tuple[Collective, ...]:
    """The smallest sets first."""
    found = [each for report in reports for each in report.collectives]
    return tuple(sorted(found, key=lambda each: (len(each.workers), [rank_of(name) for name in each.workers])))


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
    made, _ = built_optimizer(workload, StandInParameters(graph.deferred.model.named_parameters()), {})
    return type(made).__name__
