"""How the solver's time grows with partitions and workers, on seeded synthetic clusters of three kinds.

    python benchmarks/solver/growth.py [--sizes 12x4 24x8 48x8] [--time-limit 60] [--gap 0.01] [--solver highs|cbc]

Each row is one process, started anew: its time is the whole of `python`, imports and writing included.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import subprocess
import sys
import time

from assigner.profile import Edge, Link, LinkPoint, Measurement, Partition, Profile, Worker, WorkloadReference

KINDS = {"fast": (1.0, 24e9), "middle": (1.8, 16e9), "slow": (3.5, 8e9)}
"""Slowness against the first, and memory in bytes."""

HEADER = (
    "size", "links", "micro-batches", "stages", "remat", "step ms", "bound ms", "gap %", "status", "proven by",
    "search s", "MiB", "best baseline / plan", "process s",
)  # fmt: skip


def cluster(partitions: int, workers: int, *, links: str, seed: int = 0, batch: int = 32, busy: float = 0.0) -> Profile:
    """A transformer-like chain on workers of three kinds, two to a host, with memory that binds.

    Args:
        partitions: A first and a last one unlike the blocks between them.
        workers: Their kinds take turns.
        links: "kinds": alike between the same kinds; "distinct": every directed pair has its own.
        seed: Of all draws.
        batch: Samples in a step.
        busy: Share of a message's time that keeps its receiver busy, and half of it its sender.
    """
    rng = random.Random(seed)  # noqa: S311 - a benchmark, not a secret
    names = ["embed", *(f"block.{i}" for i in range(partitions - 2)), "head"]
    work = [0.4, *(rng.uniform(0.8, 1.25) for _ in names[2:]), 1.7]
    kinds = [list(KINDS)[w % 3] for w in range(workers)]
    total = sum(KINDS[kind][1] for kind in kinds)
    activation = 1.15 * total / partitions / batch  # without remat a little more than all workers hold
    parameters = 0.1 * total / partitions / 4
    sweeps = {
        (a, b): (rng.uniform(5e-5, 3e-4), rng.choice([2.5e8, 1e9, 3e9])) for a in KINDS for b in KINDS
    }  # fmt: skip

    def link(u: int, v: int) -> Link:
        latency, bandwidth = sweeps[kinds[u], kinds[v]]
        if links == "distinct":
            latency, bandwidth = latency * rng.uniform(0.7, 1.4), bandwidth * rng.uniform(0.7, 1.4)
        points = tuple(LinkPoint(size, latency + size / bandwidth) for size in (1e3, 1e5, 1e7))
        return Link(names_of[u], names_of[v], points, "gloo", busy / 2, busy)

    names_of = [f"worker:{w}/cpu" for w in range(workers)]
    return Profile(
        workload=WorkloadReference("synthetic", "", f"sha256:{seed}", batch, "float32", "AdamW"),
        workers=tuple(
            Worker(names_of[w], kinds[w], f"host{w // 2}", "cpu", KINDS[kinds[w]][1]) for w in range(workers)
        ),
        links=tuple(link(u, v) for u in range(workers) for v in range(workers) if u != v),
        partitions=tuple(Partition(name, name, parameters, parameters, 2 * parameters) for name in names),
        edges=tuple(Edge(a, b, 2.5e5) for a, b in itertools.pairwise(names)),
        measurements=tuple(
            Measurement(
                name, names_of[first], size,
                1e-3 * work[i] * slow * (size + 0.4), 2e-3 * work[i] * slow * (size + 0.4), 1e-3 * slow,
                activation * size * (0.8 + 0.4 * (i % 2)), 1e7,
            )
            for i, name in enumerate(names)
            for kind, (slow, _) in KINDS.items() if kind in kinds
            for first in [kinds.index(kind)]
            for size in (1, 8)
        ),
    )  # fmt: skip


def solve_one(case: argparse.Namespace) -> None:
    """Solve one case in this process and print its row."""
    from assigner.solver import SolveOptions, solve

    partitions, workers = map(int, case.one.split("x"))
    profile = cluster(partitions, workers, links=case.links, seed=case.seed, busy=case.busy)
    options = SolveOptions(gap=case.gap, time_limit=case.time_limit, solver=case.solver)
    solution = solve(profile, options)
    report = solution.plan.solver
    assert report is not None
    best = min(baseline.step_s for baseline in solution.plan.baselines if baseline.step_s is not None)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    again = sum(len(stage.rematerialise) for stage in solution.plan.stages)
    cells = [
        case.one, case.links, solution.plan.micro_batches, len(solution.plan.stages), again,
        f"{1e3 * report.objective_s:.1f}", f"{1e3 * report.bound_s:.1f}", f"{100 * report.gap:.2f}", report.status,
        ", ".join(report.options["proven_by"]), f"{report.seconds:.1f}", f"{memory:.0f}",
        f"{best / report.objective_s:.2f}",
    ]  # fmt: skip
    print(f"| {' | '.join(map(str, cells))} |", end="")
    if case.verbose:
        print()
        for candidate in solution.candidates:
            print(candidate)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["12x4", "24x4", "24x8", "48x8"])
    parser.add_argument("--kinds-of-links", nargs="+", default=["kinds", "distinct"])
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--time-limit", type=float, default=60)
    parser.add_argument("--solver", default="highs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=float, default=0.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--links", default="kinds", help=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true")
    case = parser.parse_args()
    if case.one:
        solve_one(case)
        return
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for size in case.sizes:
        for links in case.kinds_of_links:
            given = ["--gap", case.gap, "--time-limit", case.time_limit, "--solver", case.solver, "--seed", case.seed]
            given += ["--busy", case.busy, "--one", size, "--links", links]
            start = time.monotonic()
            row = subprocess.run(
                [sys.executable, __file__, *map(str, given)], check=True, capture_output=True, text=True
            )
            print(f"{row.stdout} {time.monotonic() - start:.1f} |", flush=True)


if __name__ == "__main__":
    main()
