"""Small documented instances: profiles built by hand, so that a test can say what the answer must be."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assigner.formats.plan import Plan
from assigner.formats.profile import (
    Edge,
    Link,
    LinkPoint,
    Measurement,
    Partition,
    Profile,
    Worker,
    WorkloadReference,
)
from assigner.formats.stage import Stage
from assigner.location import rank_of
from assigner.solver.problem.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPACITY = 1e9


def single(**asked: Any) -> SolveOptions:
    """Options of a search with one worker a stage, which is what `brute_force.best_plan` looks at."""
    return SolveOptions(**{"max_replicas": 1, "schedule": "one-stage", **asked})


def worker_name(rank: int) -> str:
    return f"worker:{rank}/cpu"


def make_profile(
    *,
    work: Sequence[float],
    slowness: Sequence[float],
    edges: Sequence[tuple[int, int]] | None = None,
    edge_bytes: float = 1e5,
    bandwidth: float = 1e9,
    latency: float = 1e-4,
    capacity: float | Sequence[float] = CAPACITY,
    activation: float = 1e6,
    parameters: float = 1e6,
    batch: int = 8,
    busy: float = 0.0,
    links: bool = True,
) -> Profile:
    """Partitions p0.. with forward `work[i]` seconds a sample on a worker of slowness 1, backward twice that.

    Args:
        work: Seconds of one sample's forward, per partition.
        slowness: One factor per worker; every worker is its own kind.
        edges: Pairs of partition numbers; None: a chain.
        edge_bytes: Bytes per sample of every edge.
        bandwidth: Bytes per second of every link.
        latency: Seconds of an empty message.
        capacity: Bytes, of all workers or per worker; nothing is reserved.
        activation: Activation bytes per sample of every partition.
        parameters: Parameter bytes of every partition (gradients the same, optimizer twice).
        batch: Samples in a step.
        busy: Both busy shares of every link.
        links: False: no two workers can talk.
    """
    names = [f"p{i}" for i in range(len(work))]
    capacities = [capacity] * len(slowness) if isinstance(capacity, int | float) else list(capacity)
    pairs = edges if edges is not None else [(i, i + 1) for i in range(len(work) - 1)]
    points = tuple(LinkPoint(size, latency + size / bandwidth, 5, 0.01) for size in (1e3, 1e5, 1e7))
    return Profile(
        workload=WorkloadReference("tiny", "tiny.py:workload", "sha256:00", batch, "float32", "SGD"),
        workers=tuple(
            Worker(worker_name(w), f"kind{w}", f"host{w}", "cpu", capacities[w]) for w in range(len(slowness))
        ),
        links=tuple(
            Link(worker_name(u), worker_name(v), points, "gloo", busy, busy)
            for u in range(len(slowness))
            for v in range(len(slowness))
            if u != v and links
        ),
        partitions=tuple(Partition(name, name, parameters, parameters, 2 * parameters) for name in names),
        edges=tuple(Edge(names[i], names[j], edge_bytes) for i, j in pairs),
        measurements=tuple(
            Measurement(
                names[i], worker_name(w), size, work[i] * slow * size, 2 * work[i] * slow * size, 1e-4 * slow,
                activation * size, 0.0, 7, 0.01,
            )
            for i in range(len(work))
            for w, slow in enumerate(slowness)
            for size in (1, 4)
        ),
    )  # fmt: skip


def random_chain(seed: int, *, partitions: int, workers: int, tight: bool = False, busy: float = 0.0) -> Profile:
    """A seeded chain on unlike workers; `tight`: a worker holds about half of the model without remat."""
    rng = random.Random(seed)
    work = [rng.uniform(1e-3, 8e-3) for _ in range(partitions)]
    slowness = [rng.choice([1.0, 2.0, 3.5]) for _ in range(workers)]
    activation = 1e6
    whole = partitions * (4e6 + 8 * (activation + 1e5))
    return make_profile(
        work=work, slowness=slowness, activation=activation, busy=busy, edge_bytes=rng.uniform(1e4, 1e6),
        capacity=[whole * rng.uniform(0.3, 0.7) if tight else CAPACITY for _ in slowness],
        bandwidth=rng.choice([2e8, 1e9]),
    )  # fmt: skip


def on_devices(profile: Profile, devices: Sequence[str]) -> Profile:
    """The profile with its workers on these devices, which their names end with."""
    workers = [
        replace(each, name=f"worker:{n}/{devices[n]}", device=devices[n]) for n, each in enumerate(profile.workers)
    ]
    named = {each.name: worker.name for each, worker in zip(profile.workers, workers, strict=True)}
    return replace(
        profile,
        workers=tuple(workers),
        links=tuple(replace(each, source=named[each.source], target=named[each.target]) for each in profile.links),
        measurements=tuple(replace(each, worker=named[each.worker]) for each in profile.measurements),
    )


def make_plan(profile: Profile, stages: Sequence[tuple[int, Sequence[str]]], *, micro_batches: int = 4) -> Plan:
    """A plan with stages as (rank, partition names), nothing rematerialised."""
    size = -(-profile.workload.batch_size // micro_batches)
    named = {rank_of(each.name): each.name for each in profile.workers}
    return Plan(
        workload=profile.workload,
        micro_batches=micro_batches,
        micro_batch_size=size,
        stages=tuple(Stage(named.get(rank, worker_name(rank)), tuple(names)) for rank, names in stages),
    )
