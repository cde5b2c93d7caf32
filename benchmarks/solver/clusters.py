"""Synthetic profiles: a chain or graph of partitions on a cluster of three kinds of workers, drawn from a seed.

links     kinds      alike between workers of the same kinds
distinct   every directed pair has a link of its own
hosts      fast inside a host, thin between hosts
memory    tight      the activations alone are 1.15 times what all workers hold: without remat nothing fits
loose      half of that
work      like       blocks that differ by a quarter either way, activations of two sizes
unlike     work, activations, parameters and messages differ by a factor of up to four
graph     chain      each partition reads the one in front of it
towers     two chains of equal length, and a last partition that reads both
fan        the first is read by all others, the last reads them
layers     three partitions beside each other, each of which reads two of the three in front
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Literal

from assigner.formats.profile import Edge, Link, LinkPoint, Measurement, Partition, Profile, Worker, WorkloadReference

if TYPE_CHECKING:
    from collections.abc import Sequence

Links = Literal["kinds", "distinct", "hosts"]
Memory = Literal["tight", "loose"]
Work = Literal["like", "unlike"]
Graph = Literal["chain", "towers", "fan", "layers"]

KINDS = {"fast": (1.0, 24e9), "middle": (1.8, 16e9), "slow": (3.5, 8e9)}
"""Slowness against the first, and memory in bytes."""

INSIDE = (2e-5, 5e9)
BETWEEN = (2e-4, 1.2e8)
"""Seconds and bytes per second of a link inside a host and of one between two."""


def cluster(
    partitions: int, workers: int, *, links: Links, hosts: int | None = None, memory: Memory = "tight",
    work: Work = "like", seed: int = 0, batch: int = 32, busy: float = 0.0, graph: Graph = "chain",
) -> Profile:  # fmt: skip
    """A transformer-like chain, or a graph of such blocks, on workers of three kinds.

    Args:
        partitions: A first and a last one unlike the blocks between them.
        workers: Their kinds take turns.
        links: How they differ.
        hosts: Workers fill one after the other; None: two workers to a host.
        memory: How far the activations exceed it.
        work: How far the partitions differ.
        seed: Of all draws.
        batch: Samples in a step.
        busy: Share of a message's time that keeps its receiver busy, and half of it its sender.
        graph: Who reads from whom; each value has the size that what reads it next in a chain would get.
    """
    rng = random.Random(seed)  # noqa: S311 - a benchmark, not a secret
    names = ["embed", *(f"block.{i}" for i in range(partitions - 2)), "head"]
    seconds = [0.4, *(rng.uniform(0.8, 1.25) for _ in names[2:]), 1.7]
    kinds = [list(KINDS)[w % 3] for w in range(workers)]
    held = {"tight": 1.15, "loose": 0.575}[memory] * sum(KINDS[kind][1] for kind in kinds)
    activations = [held / partitions / batch * (0.8 + 0.4 * (i % 2)) for i in range(partitions)]
    parameters = [0.1 * sum(KINDS[kind][1] for kind in kinds) / partitions / 4] * partitions
    sizes = [2.5e5] * (partitions - 1)
    each_host = -(-workers // hosts) if hosts else 2
    names_of = [f"worker:{w}/cpu" for w in range(workers)]
    host_of = [f"host{w // each_host}" for w in range(workers)]
    points = _sweeps(rng, links, kinds, host_of)
    if work == "unlike":
        seconds, activations, parameters, sizes = (
            [value * rng.uniform(0.5, 2.0) for value in values] for values in (seconds, activations, parameters, sizes)
        )
    return Profile(
        workload=WorkloadReference("synthetic", "", f"sha256:{seed}", batch, "float32", "AdamW"),
        workers=tuple(
            Worker(names_of[w], kinds[w], host_of[w], "cpu", KINDS[kinds[w]][1]) for w in range(workers)
        ),
        links=tuple(
            Link(names_of[u], names_of[v], points[u, v], "gloo", busy / 2, busy)
            for u, v in itertools.permutations(range(workers), 2)
        ),
        partitions=tuple(
            Partition(name, name, held_, held_, 2 * held_) for name, held_ in zip(names, parameters, strict=True)
        ),
        edges=tuple(Edge(names[a], names[b], sizes[a]) for a, b in _pairs(graph, partitions, rng)),
        measurements=tuple(
            Measurement(
                name, names_of[kinds.index(kind)], size,
                1e-3 * seconds[i] * slow * (size + 0.4), 2e-3 * seconds[i] * slow * (size + 0.4), 1e-3 * slow,
                activations[i] * size, 1e7,
            )
            for i, name in enumerate(names)
            for kind, (slow, _) in KINDS.items() if kind in kinds
            for size in (1, 8)
        ),
    )  # fmt: skip


def _pairs(graph: Graph, partitions: int, rng: random.Random) -> list[tuple[int, int]]:
    """The numbers of who makes a value and who reads it."""
    last = partitions - 1
    if graph == "chain":
        return [*itertools.pairwise(range(partitions))]
    if graph == "fan":
        return [(0, i) for i in range(1, last)] + [(i, last) for i in range(1, last)]
    if graph == "towers":
        towers = range(last // 2), range(last // 2, last)
        return [*itertools.chain(*map(itertools.pairwise, towers)), *((tower[-1], last) for tower in towers)]
    layers = [range(first, min(first + 3, partitions)) for first in range(0, partitions, 3)]
    return sorted(
        (i, j) for front, behind in itertools.pairwise(layers) for j in behind for i in rng.sample(front, 2)
    )  # fmt: skip


def _sweeps(
    rng: random.Random, links: Links, kinds: Sequence[str], host_of: Sequence[str]
) -> dict[tuple[int, int], tuple[LinkPoint, ...]]:
    """The measured points of every directed link."""
    of_kinds = {
        (a, b): (rng.uniform(5e-5, 3e-4), rng.choice([2.5e8, 1e9, 3e9])) for a in KINDS for b in KINDS
    }  # fmt: skip
    found = {}
    for u, v in itertools.permutations(range(len(kinds)), 2):
        latency, bandwidth = of_kinds[kinds[u], kinds[v]]
        if links == "hosts":
            latency, bandwidth = INSIDE if host_of[u] == host_of[v] else BETWEEN
        if links == "distinct":
            latency, bandwidth = latency * rng.uniform(0.7, 1.4), bandwidth * rng.uniform(0.7, 1.4)
        found[u, v] = tuple(LinkPoint(size, latency + size / bandwidth) for size in (1e3, 1e5, 1e7))
    return found
