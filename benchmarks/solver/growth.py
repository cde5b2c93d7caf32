"""How the solver's time, memory and gap grow with partitions and workers, on the synthetic clusters of clusters.py.

    python benchmarks/solver/growth.py [--only 48x16 ...] [--links kinds distinct hosts] [--hosts 4] [--seed 0]
                                       [--memory loose] [--work unlike] [--busy 0.4] [--gap 0.01] [--solver cbc]
                                       [--max-replicas all] [--graph towers] [--schedule auto] [--cpu]

One worker a stage unless `--max-replicas` asks for more; a row says how many stages are shared.

Each row is one process of its own, on one core, started anew: its time is the whole of `python`, imports and baselines
included. Each size has a time limit and a gap at which the search may stop, and a goal: a row that misses it says so.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from clusters import cluster


@dataclass(frozen=True)
class Size:
    """A size with its goal.

    Args:
        partitions: Of the chain.
        workers: Of the cluster.
        hosts: On which they are.
        gap: The search stops at this share; None of the goal's gaps is smaller.
        goal_gap: The plan is to be proven within this share of the best; None: any bound will do.
        goal_s: Seconds of the whole process.
    """

    partitions: int
    workers: int
    hosts: int
    gap: float
    goal_gap: float | None
    goal_s: float

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.partitions}x{self.workers}"


SIZES = (
    Size(12, 4, 2, 0.01, 0.01, 10), Size(24, 8, 4, 0.01, 0.01, 10), Size(48, 8, 4, 0.01, 0.01, 30),
    Size(48, 16, 4, 0.01, 0.02, 30), Size(96, 32, 8, 0.01, 0.05, 60), Size(1000, 64, 8, 0.02, None, 60),
)  # fmt: skip

SEARCH = 0.85
"""Share of a goal's seconds that the search may take; the rest is for start, baselines and writing."""

HEADER = (
    "size", "hosts", "links", "micro-batches", "stages", "shared", "remat", "step ms", "bound ms", "gap %", "proven by",
    "best baseline / plan", "search s", "MiB", "CPU s", "process s", "goal",
)  # fmt: skip


def solve_one(case: argparse.Namespace, size: Size) -> None:
    """Solve one case in this process and print its row, all but the last two cells."""
    from assigner.solver import SolveOptions, solve
    from assigner.solver.limits.clock import SolveClock

    if case.cpu:
        SolveClock.now = staticmethod(time.process_time)
    (links,) = case.links
    profile = cluster(
        size.partitions, size.workers, links=links, hosts=case.hosts or size.hosts, memory=case.memory,
        work=case.work, seed=case.seed, busy=case.busy, graph=case.graph,
    )  # fmt: skip
    options = SolveOptions(
        schedule=case.schedule, gap=None if case.close else size.gap if case.gap is None else case.gap,
        solver=case.solver, time_limit=case.time_limit or SEARCH * size.goal_s,
        max_replicas=None if case.max_replicas == "all" else int(case.max_replicas),
    )  # fmt: skip
    solution = solve(profile, options)
    report = solution.plan.solver
    assert report is not None
    best = min(baseline.step_s for baseline in solution.plan.baselines if baseline.step_s is not None)
    again = sum(len(stage.rematerialise) for stage in solution.plan.stages)
    cells = [
        size.name, case.hosts or size.hosts, links, solution.plan.micro_batches, len(solution.plan.stages),
        sum(len(stage.workers) > 1 for stage in solution.plan.stages), again,
        f"{1e3 * report.objective_s:.1f}", f"{1e3 * report.bound_s:.1f}", f"{100 * report.gap:.2f}",
        ", ".join(report.proven_by), f"{best / report.objective_s:.2f}", f"{report.seconds:.1f}",
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}", f"{time.process_time():.1f}",
    ]  # fmt: skip
    print(f"| {' | '.join(map(str, cells))} |", end="")
    if case.verbose:
        print()
        for candidate in solution.plan.candidates:
            print(candidate)


def _goal(size: Size, row: str, seconds: float) -> str:
    gap = float(row.split("|")[HEADER.index("gap %") + 1])
    wanted = f"{100 * size.goal_gap:.0f} %" if size.goal_gap is not None else "a bound"
    met = seconds <= size.goal_s and (size.goal_gap is None or gap <= 100 * size.goal_gap + 0.005)
    return f"{'met' if met else 'MISSED'}: {wanted} in {size.goal_s:.0f} s"


def main() -> None:
    """Print the table."""
    sizes = {size.name: size for size in SIZES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sizes, default=list(sizes))
    parser.add_argument("--links", nargs="+", choices=["kinds", "distinct", "hosts"],
                        default=["kinds", "distinct", "hosts"])  # fmt: skip
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--memory", default="tight", choices=["tight", "loose"])
    parser.add_argument("--work", default="like", choices=["like", "unlike"])
    parser.add_argument("--graph", default="chain", choices=["chain", "towers", "fan", "layers"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=float, default=0.0)
    parser.add_argument("--gap", type=float)
    parser.add_argument("--close", action="store_true", help="no gap is asked for: on to 0 where that takes seconds")
    parser.add_argument("--time-limit", type=float)
    parser.add_argument(
        "--cpu", action="store_true", help="the limit is of a processor's seconds: a busy machine does not count"
    )
    parser.add_argument("--solver", default="highs", choices=["highs", "cbc"])
    parser.add_argument("--schedule", default="gpipe", choices=["auto", "gpipe", "1f1b"])
    parser.add_argument("--max-replicas", default="1", metavar="all|N")
    parser.add_argument("--verbose", action="store_true", help="the candidates too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    case = parser.parse_args()
    if case.one:
        solve_one(case, sizes[case.only[0]])
        return
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for name in case.only:
        for links in case.links:
            given = [*sys.argv[1:], "--only", name, "--links", links, "--one"]
            start = time.monotonic()
            row = subprocess.run([sys.executable, __file__, *given], check=True, stdout=subprocess.PIPE, text=True)
            seconds = time.monotonic() - start
            print(f"{row.stdout} {seconds:.1f} | {_goal(sizes[name], row.stdout, seconds)} |", flush=True)


if __name__ == "__main__":
    main()
