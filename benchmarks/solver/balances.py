"""torchgpipe's hand-made splits of AmoebaNet-D, its balance by time, and the solver, on one and the same profile.

    python benchmarks/solver/balances.py                          with the profile that lies beside this file
    python benchmarks/solver/balances.py --measure new.json       measure this machine first (about 3 minutes)

The profile has one worker. It is given to 2, 4 or 8 like ones, with one link between any two. Every row is one number
of workers, of micro-batches, and one way with memory: nothing rematerialised, or everything, as torchgpipe does by
default (there: in all micro-batches but the last). `of the draws`: the gain on profiles drawn from the spreads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.profile import Link, LinkPoint, Profile, load_profile
from assigner.formats.stage import Stage
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve, solve_baseline
from assigner.solver.robust.spreads import resampled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
PROFILE = HERE / "amoebanet-d.json"
ENTRY = f"{HERE / 'amoebanet.py'}:workload(size=128)"

PUBLISHED = {
    (2, 1): (7, 17), (4, 1): (3, 4, 5, 12), (8, 1): (2, 2, 2, 2, 2, 3, 4, 7),
    (2, None): (9, 15), (4, None): (3, 6, 7, 8), (8, None): (2, 2, 2, 3, 3, 4, 4, 4),
}  # fmt: skip
"""By (workers, micro-batches; None: more than one), from torchgpipe's repository, benchmarks/amoebanetd-speed."""

COUNTS = (1, 4, 32)
"""Micro-batches, as in torchgpipe's table."""

SIZES = (1e3, 1e5, 1e7)

HEADER = (
    "workers", "M", "remat", "published", "s", "balance by time", "s", "solved", "s", "bound s", "status", "gain %",
    "of the draws",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting: (sizes of the stages, step time in seconds) of three ways, and what the solver has proven."""

    workers: int
    micro_batches: int
    remat: str
    published: tuple[tuple[int, ...], float]
    by_time: tuple[tuple[int, ...], float]
    solved: tuple[tuple[int, ...], float]
    bound_s: float
    status: str

    @property
    def gain(self) -> float:
        """By how many per cent the solved plan is faster than the published balance."""
        return 100 * (self.published[1] / self.solved[1] - 1)


def like_workers(profile: Profile, number: int, *, latency: float, bandwidth: float, memory: float) -> Profile:
    """The profile's first worker `number` times, with one link between any two.

    Args:
        profile: Measured on one worker.
        number: Of workers.
        latency: Seconds of an empty message.
        bandwidth: Bytes per second.
        memory: Bytes of each worker.
    """
    first = profile.workers[0]
    names = [f"worker:{rank}/{first.device}" for rank in range(number)]
    points = tuple(LinkPoint(size, latency + size / bandwidth) for size in SIZES)
    return replace(
        profile,
        workers=tuple(replace(first, name=name, memory_bytes=memory, reserve_bytes=0.0) for name in names),
        links=tuple(Link(a, b, points) for a in names for b in names if a != b),
        measurements=tuple(replace(each, worker=names[0]) for each in profile.measurements),
    )


def split(profile: Profile, sizes: tuple[int, ...], *, micro_batches: int, remat: str) -> Plan:
    """A balance as a plan: `sizes[k]` layers on the worker of rank k."""
    stages, at = [], 0
    for worker, size in zip(profile.workers, sizes, strict=True):
        held = profile.order[at : at + size]
        stages.append(Stage(worker.name, held, held if remat == "always" else (), threads=worker.threads))
        at += size
    return Plan(
        workload=profile.workload, micro_batches=micro_batches,
        micro_batch_size=profile.workload.batch_size // micro_batches, stages=tuple(stages),
    )  # fmt: skip


def priced(profile: Profile, plan: Plan) -> tuple[tuple[int, ...], float]:
    """The sizes of a plan's stages and its step time, in seconds, which fits into memory."""
    prediction = predict(plan, profile)
    assert not overfull(prediction), "give the workers more --memory"
    return tuple(len(stage.partitions) for stage in plan.stages), prediction.step_s


def row(profile: Profile, *, micro_batches: int, remat: str, time_limit: float) -> Row:
    """One setting, priced; `profile` has the workers."""
    number = len(profile.workers)
    options = SolveOptions(
        schedule="gpipe", micro_batches=micro_batches, remat="never" if remat == "never" else "always", gap=0.0,
        time_limit=time_limit, max_replicas=1,
    )  # fmt: skip
    hand_made = PUBLISHED[number, 1 if micro_batches == 1 else None]
    solution = solve(profile, options).plan
    report = solution.solver
    assert report is not None
    return Row(
        number, micro_batches, remat,
        published=priced(profile, split(profile, hand_made, micro_batches=micro_batches, remat=remat)),
        by_time=priced(profile, solve_baseline(profile, "balance", options)),
        solved=priced(profile, solution),
        bound_s=report.bound_s, status=report.status,
    )  # fmt: skip


def settings(profile: Profile, case: argparse.Namespace) -> Iterator[Row]:
    """All settings, one after another."""
    for number in (2, 4, 8):
        cluster = like_workers(profile, number, latency=case.latency, bandwidth=case.bandwidth, memory=case.memory)
        for micro_batches in COUNTS:
            for remat in ("never", "always"):
                yield row(cluster, micro_batches=micro_batches, remat=remat, time_limit=case.time_limit)


def line(row: Row, gains: Sequence[float]) -> str:
    """A row of the table; `gains` are those of the draws."""

    def way(sizes: tuple[int, ...], seconds: float) -> list[str]:
        return [" ".join(map(str, sizes)), f"{seconds:.3f}"]

    cells = [
        row.workers, row.micro_batches, row.remat, *way(*row.published), *way(*row.by_time), *way(*row.solved),
        f"{row.bound_s:.3f}", row.status, f"{row.gain:.1f}",
        f"{min(gains):.1f} .. {max(gains):.1f}" if gains else "",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table; fails if the solver is worse than a balance anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE, help="a profile of AmoebaNet-D on one worker")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure first, into a new file")
    parser.add_argument("--latency", type=float, default=5e-5, help="of every link, in seconds")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="of every link, in bytes per second")
    parser.add_argument("--memory", type=float, default=64e9, help="of every worker, in bytes")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of one search, in seconds")
    parser.add_argument("--draws", type=int, default=20, help="profiles drawn from the spreads, each solved as well")
    case = parser.parse_args()
    if case.measure:
        command = [sys.executable, "-m", "assigner_cli", "profile", ENTRY, "-o", str(case.measure)]
        subprocess.run([*command, "--micro-batches", "1,2"], check=True)
    profile = load_profile(case.measure or case.profile)
    found = list(settings(profile, case))
    drawn = [list(settings(resampled(profile, seed), case)) for seed in range(case.draws)]
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for n, each in enumerate(found):
        print(line(each, [rows[n].gain for rows in drawn]))
    everything = [each for rows in (found, *drawn) for each in rows]
    proven = sum(each.status == "optimal" for each in everything)
    slower = sum(each.solved[1] > min(each.published[1], each.by_time[1]) * (1 + 1e-9) for each in everything)
    print(
        f"\n{len(everything)} searches: {proven} proven optimal, the solved plan is slower than a balance in {slower}"
    )
    if slower:
        sys.exit(1)


if __name__ == "__main__":
    main()
