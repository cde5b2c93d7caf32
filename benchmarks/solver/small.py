"""500 random small instances: is the solver's plan the best of all? Every placement of each is priced to find out.

    python benchmarks/solver/small.py                    all 500, a few minutes on one core
    python benchmarks/solver/small.py --first 100 --count 50

Instances have 4 to 7 partitions on 2 to 4 workers: chains and graphs, missing links, tight memory, busy links, pins,
partitions kept together or apart, rematerialised always or never, a largest number of workers. Each is solved with
`--schedule gpipe` (one stage a worker) and with `--schedule interleaved` (any number), gap 0, micro-batch count free.
The other side is `tests/every_placement.py`, which shares no code with the solver but the simulator: every partition on
every worker, every way to form and order stages, every choice of what to rematerialise. It is told the solver's value
only to pass over workers whose work alone takes longer. Exit code 1 if one instance differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from brute_force import random_instance
from every_placement import best_of_all

from assigner.errors import InfeasibleError
from assigner.formats.profile import Profile
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve

SCHEDULES = ("gpipe", "interleaved")
SIZES = ((4, 3), (4, 4), (5, 2), (5, 3), (5, 3), (5, 4), (6, 2), (6, 3), (6, 3))
"""(partitions, workers); every fiftieth instance has 7 on 4."""

SAME = 1e-9
"""Two values that differ by this share, or less, differ by rounding."""


@dataclass(frozen=True)
class Case:
    """One instance with its hints."""

    profile: Profile
    most_workers: int | None


def case(seed: int) -> Case:
    """The seed's instance."""
    rng = random.Random(seed)  # noqa: S311 - a benchmark, not a secret
    partitions, workers = (7, 4) if seed % 50 == 49 else rng.choice(SIZES)
    profile = random_instance(
        seed, partitions=partitions, workers=workers, busy=rng.random() < 0.5, tight=rng.random() < 0.5,
        missing=rng.choice([0.0, 0.0, 0.1, 0.3]), pins=rng.random() < 0.3, late_updates=rng.random() < 0.2,
        alike=rng.random() < 0.3, graph=rng.random() < 0.6, batch=2 if partitions == 7 else rng.choice([2, 4]),
    )  # fmt: skip
    parts = list(profile.partitions)
    if rng.random() < 0.2:
        for i in rng.sample(range(partitions), 2):
            parts[i] = replace(parts[i], apart="apart") if parts[i].colocate is None else parts[i]
    if rng.random() < 0.2:
        i = rng.randrange(partitions)
        parts[i] = replace(parts[i], rematerialise=rng.choice(["never", "always"]))
    most = rng.randint(1, workers) if rng.random() < 0.15 else None
    return Case(replace(profile, partitions=tuple(parts)), most)


def difference(each: Case, schedule: str) -> float:
    """The share by which the solver's step time is off the best of all; inf: one of them has no plan, or no proof."""
    try:
        options = SolveOptions(schedule=schedule, gap=0.0, max_workers=each.most_workers, max_replicas=1)
        plan = solve(each.profile, options).plan
    except InfeasibleError:
        plan = None
    step = math.inf if plan is None else predict(plan, each.profile).step_s
    best = best_of_all(
        each.profile,
        schedule=schedule,
        below=step * (1 + 1e-6),
        most_workers=each.most_workers or len(each.profile.workers),
    )
    if plan is None or best is None:
        return 0.0 if plan is None and best is None else math.inf
    assert plan.solver is not None
    if plan.solver.status != "optimal" or plan.schedule != schedule or overfull(predict(plan, each.profile)):
        return math.inf
    return abs(step - best[0]) / best[0]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=500, help="how many")
    options = parser.parse_args()
    start, worst, failed = time.monotonic(), 0.0, []
    graphs = 0
    for seed in range(options.first, options.first + options.count):
        each = case(seed)
        graphs += not each.profile.is_chain
        for schedule in SCHEDULES:
            share = difference(each, schedule)
            worst = max(worst, share)
            if share > SAME:
                failed.append(f"{seed} {schedule}")
                print(f"seed {seed}, {schedule}: off by {share:.3g}", flush=True)
        if (seed + 1) % 50 == 0:
            print(f"seeds up to {seed}: {time.monotonic() - start:.0f} s", flush=True)
    runs = options.count * len(SCHEDULES)
    print(
        f"{options.count} instances ({graphs} graphs) x {len(SCHEDULES)} schedules: {runs - len(failed)} of {runs}"
        f" equal, worst difference {worst:.3g}, {time.monotonic() - start:.0f} s"
        f" ({time.process_time():.0f} s of one core)"
    )
    if failed:
        print(f"failed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
