"""How long the simulator takes for times and memory over time of large plans.

    python benchmarks/simulator/run.py [--repeats 5]

A chain of two partitions a worker, the first of them rematerialised, on unlike workers with busy links. Time is the
process's own (`time.process_time`), so that what else the machine does is not in it; from a profile and a plan that
are in memory, nothing kept from one repeat to the next.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

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
)  # fmt: skip
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.simulate import simulated, summary

SIZES = ((8, 32), (16, 128), (64, 512))
"""Workers and micro-batches."""


def chain(workers: int, micro_batches: int) -> Profile:
    """Two partitions for each worker in a row; three kinds of workers, a link between neighbours in both directions."""
    partitions = [f"block.{n}" for n in range(2 * workers)]
    names = [f"worker:{n}/cpu" for n in range(workers)]
    points = tuple(LinkPoint(size, 1e-4 + size / 1e9) for size in (1e3, 1e5, 1e7))
    ends = [pair for n in range(workers - 1) for pair in ((n, n + 1), (n + 1, n))]
    return Profile(
        workload=WorkloadReference("chain", batch_size=micro_batches),
        workers=tuple(Worker(name, f"kind{n % 3}", f"host{n}", "cpu", 16e9) for n, name in enumerate(names)),
        links=tuple(Link(names[u], names[v], points, sender_busy=0.2, receiver_busy=0.3) for u, v in ends),
        partitions=tuple(Partition(name, "block", 4e6, 4e6, 8e6) for name in partitions),
        edges=tuple(Edge(a, b, 2e5) for a, b in itertools.pairwise(partitions)),
        measurements=tuple(
            Measurement("block.0", names[n], 1, slow * 1e-3, slow * 2e-3, 1e-4, 3e6, 1e6)
            for n, slow in enumerate((1.0, 1.6, 2.3))
        ),
    )


def plan_of(profile: Profile, schedule: str) -> Plan:
    """Two partitions on each worker."""
    names = [partition.name for partition in profile.partitions]
    return Plan(
        workload=profile.workload,
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=profile.workload.batch_size,
        micro_batch_size=1,
        stages=tuple(
            Stage(worker.name, tuple(names[2 * n : 2 * n + 2]), (names[2 * n],))
            for n, worker in enumerate(profile.workers)
        ),
    )


def measure(profile: Profile, plan: Plan) -> tuple[float, float, int]:
    """Seconds for times, seconds for memory over time, and how many moments that has."""
    start = time.process_time()
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    summary(timeline, cost)
    timed = time.process_time()
    moments = sum(len(each.held) for each in memory_over_time(timeline, cost))
    return timed - start, time.process_time() - timed, moments


def main() -> None:
    """Print one row of the table for each size and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    header = (
        "workers",
        "micro-batches",
        "schedule",
        "actions",
        "moments",
        "times s",
        "memory s",
        "both s",
        "slowest s",
    )
    print("| " + " | ".join(header) + " |")
    print("|" + " --- |" * len(header))
    for workers, micro_batches in SIZES:
        profile = chain(workers, micro_batches)
        for schedule in ("gpipe", "1f1b"):
            plan = plan_of(profile, schedule)
            runs = [measure(profile, plan) for _ in range(repeats)]
            times, memory, _ = (statistics.median(column) for column in zip(*runs, strict=True))
            both = [run[0] + run[1] for run in runs]
            actions = workers * (2 * micro_batches + 1) + 4 * (workers - 1) * micro_batches
            row = (workers, micro_batches, schedule, f"{actions:,}", f"{runs[0][2]:,}", f"{times:.2f}", f"{memory:.2f}",
                   f"{statistics.median(both):.2f}", f"{max(both):.2f}")  # fmt: skip
            print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
