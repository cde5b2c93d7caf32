"""Put the ranks' reports together into one profile."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from assigner import __version__
from assigner.profile import (
    Link,
    LinkPoint,
    Measurement,
    Partition,
    Profile,
    Worker,
    WorkloadReference,
)
from assigner.profiler.compute import state_bytes
from assigner.profiler.host import HostFacts
from assigner.profiler.links import LinkSweep, SweepPoint
from assigner.profiler.sampling import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.marking import PartitionGraph
    from assigner.workload import Workload

_WIDE_SPREAD = 0.10
_TELLING_S = 1e-3  # the spread of a shorter message is the clock's and the scheduler's


@dataclass(frozen=True)
class RankReport:
    """What one rank measured.

    Args:
        facts: Its worker.
        measurements: Its partitions, one of each kind.
        optimizer_bytes: Optimizer state by kind of partition.
        sweeps: The links that start at it.
    """

    facts: HostFacts
    measurements: tuple[Measurement, ...]
    optimizer_bytes: dict[str, int]
    sweeps: tuple[LinkSweep, ...]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> RankReport:
        """A report as it came over the store."""
        return cls(
            HostFacts(**found["facts"]),
            tuple(Measurement(**each) for each in found["measurements"]),
            found["optimizer_bytes"],
            tuple(_sweep(each) for each in found["sweeps"]),
        )


def _sweep(found: dict[str, Any]) -> LinkSweep:
    points = tuple(SweepPoint(each["size"], Sample(**each["sample"])) for each in found["points"])
    return LinkSweep(found["source"], found["target"], points, found["sender_busy"], found["receiver_busy"])


def assemble(
    workload: Workload,
    graph: PartitionGraph,
    reports: Sequence[RankReport],
    *,
    entry: str,
    sizes: Sequence[int],
    reserve: float,
) -> Profile:
    """One profile from all ranks' reports, in the order of the ranks."""
    names = [f"worker:{rank}/{report.facts.device}" for rank, report in enumerate(reports)]
    hosts = _host_names([report.facts for report in reports])
    workers = tuple(
        Worker(
            name, report.facts.kind, host, report.facts.device, report.facts.memory_bytes, report.facts.threads,
            int(reserve * report.facts.memory_bytes),
        )
        for name, host, report in zip(names, hosts, reports, strict=True)
    )  # fmt: skip
    tensors = graph.deferred.tensors()
    parts = []
    for piece in graph.pieces:
        parameters, gradients, buffers = state_bytes(piece, tensors)
        optimizer = reports[0].optimizer_bytes.get(piece.kind, 0)
        parts.append(
            Partition(
                piece.name,
                piece.kind,
                parameters,
                gradients,
                optimizer,
                buffers,
                piece.mark.pin,
                piece.mark.colocate,
                piece.mark.apart,
                piece.mark.rematerialise,
            )
        )
    measurements = tuple(each for report in reports for each in report.measurements)
    links = tuple(_link(names, sweep) for report in reports for sweep in report.sweeps)
    return Profile(
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tool_version=__version__,
        environment=_environment(),
        workload=WorkloadReference(
            workload.name or entry.rpartition(".py:")[0].rpartition("/")[2], entry, graph.fingerprint,
            workload.batch_size, _dtype(tensors), _optimizer_name(workload),
        ),
        workers=workers,
        links=links,
        partitions=tuple(parts),
        edges=graph.edges,
        ties=graph.ties,
        measurements=measurements,
        warnings=_warnings(measurements, links, sizes),
    )  # fmt: skip


def _host_names(facts: Sequence[HostFacts]) -> list[str]:
    """Each rank's host; nodes of the launcher that bear one name are told apart by their number."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each.host, set()).add(each.node)
    return [each.host if len(nodes[each.host]) == 1 else f"{each.host}-{each.node}" for each in facts]


def _link(names: Sequence[str], sweep: LinkSweep) -> Link:
    points = tuple(
        LinkPoint(point.size, point.sample.median, point.sample.count, point.sample.spread) for point in sweep.points
    )
    return Link(names[sweep.source], names[sweep.target], points, "gloo", sweep.sender_busy, sweep.receiver_busy)


def _environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


def _dtype(tensors: dict[str, torch.Tensor]) -> str:
    """The type that most parameters have."""
    count = Counter(
        str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()
    )
    return count.most_common(1)[0][0] if count else "float32"


def _optimizer_name(workload: Workload) -> str:
    return type(workload.optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__


def _warnings(measurements: Sequence[Measurement], links: Sequence[Link], sizes: Sequence[int]) -> tuple[str, ...]:
    """What a reader of the profile should know before trusting it; the widest spread first."""
    wide = [
        (each.spread, f"{each.partition} on {each.worker} at micro-batch {each.micro_batch}")
        for each in measurements
        if each.spread > _WIDE_SPREAD
    ]
    wide += [
        (point.spread, f"link {link.source} -> {link.target} at {point.bytes:,.0f} bytes")
        for link in links
        for point in link.points
        if point.spread > _WIDE_SPREAD and point.seconds > _TELLING_S
    ]
    found = [f"{what}: spread {spread:.0%}" for spread, what in sorted(wide, reverse=True)]
    if len(sizes) == 1:
        found.insert(0, f"one micro-batch size was measured ({sizes[0]}): plans cannot use another")
    return tuple(found)
