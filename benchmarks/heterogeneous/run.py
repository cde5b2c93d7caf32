"""The solved plan beside what else could be done, on the lab's unlike hosts: predicted and measured steps, in turn.

    python benchmarks/heterogeneous/run.py --cluster mixed3 --out /tmp/mixed3

Profiles the workload on the cluster, solves, and trains `--rounds` times in turn: the solved plan; the best with one
worker a stage and one stage a worker, with several stages a worker, and with an order that is solved for; data
parallelism, an equal pipeline, and torch's DistributedDataParallel as a user would write it (`ddp.py`). Needs root, and
a machine with nothing else running: the hosts' CPU shares must be theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from assigner import Plan, load_plan

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PLANS = {
    "solved": (),
    "one stage a worker": ("--max-replicas", "1", "--schedule", "one-stage"),
    "interleaved": ("--max-replicas", "1", "--schedule", "interleaved"),
    "listed": ("--max-replicas", "1", "--schedule", "listed"),
    "data parallel by speed": ("--baseline", "data-parallel-by-speed"),
    "equal pipeline": ("--baseline", "equal"),
}
DDP = "DistributedDataParallel"
WARM_UP = 2  # steps of each run that are left out


def on_lab(args: argparse.Namespace, *command: str, timeout: int = 1200) -> None:
    """One command on every host of the cluster, as ranks of one run."""
    assigner("lab", str(args.clusters / f"{args.cluster}.toml"), "--timeout", str(timeout), "--", *command)


def assigner(*arguments: str) -> None:
    """One command of the program on this machine."""
    subprocess.run([str(BIN / "assigner"), *arguments], check=True, cwd=ROOT)


def solved(args: argparse.Namespace, profile: Path) -> dict[str, Path]:
    """The plans by name, each in a file of its own."""
    paths = {}
    for name, flags in PLANS.items():
        paths[name] = args.out / f"{name.replace(',', '').replace(' ', '-')}.json"
        assigner("solve", str(profile), "-o", str(paths[name]), *flags, "--force")
    return paths


def train(args: argparse.Namespace, plan: Path | None, result: Path) -> list[float]:
    """Seconds of the steps of one run under a plan, or under DistributedDataParallel."""
    if plan is None:
        command = ["torchrun", "benchmarks/heterogeneous/ddp.py", args.workload]
    else:
        command = ["assigner", "run", str(plan), "--", "examples/train.py"]
    on_lab(args, *command, "--steps", str(args.steps), "--json", str(result))
    return list(json.loads(result.read_text())["step_s"][WARM_UP:])


def main() -> None:
    """Profile, solve, train in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=Path, default=ROOT / "examples" / "clusters", help="folder of cluster files")
    parser.add_argument("--cluster", default="mixed3")
    parser.add_argument("--workload", default="examples/gpt.py:workload(width=256,context=128)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep-profile", action="store_true", help="use the profile that is in --out already")
    args = parser.parse_args()
    args.clusters, args.out = args.clusters.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    profile = args.out / "profile.json"
    if not args.keep_profile:
        on_lab(args, "assigner", "profile", args.workload, "-o", str(profile), "--force")
    paths = solved(args, profile)
    runs: dict[str, list[list[float]]] = {name: [] for name in (*paths, DDP)}
    for turn in range(args.rounds):
        for name, times in runs.items():
            result = args.out / f"{name.replace(',', '').replace(' ', '-')}-{turn}.result"
            times.append(train(args, paths.get(name), result))
    show(paths, runs)


def described(plan: Plan) -> str:
    """Who holds how many partitions, in the pipeline's order: `0:9 1+2:5`, the last shared by two workers."""
    return " ".join(
        "+".join(worker.split("/")[0].removeprefix("worker:") for worker in stage.workers) + f":{len(stage.partitions)}"
        for stage in plan.stages
    )


def show(paths: dict[str, Path], runs: dict[str, list[list[float]]]) -> None:
    """The table: predicted and measured, and what each run took against the solved plan's in the same turn."""
    table = Table(
        "plan", "schedule", "workers:partitions", "M", "predicted s", "measured s (median of all)", "IQR s",
        "error %", "medians of the turns", "against solved",
    )  # fmt: skip
    solved_turns = [statistics.median(run) for run in runs["solved"]]
    for name, turns in runs.items():
        steps = [second for run in turns for second in run]
        median = statistics.median(steps)
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
        what, predicted_s = ("", "", ""), None
        if name in paths:
            plan = load_plan(paths[name])
            what, predicted_s = (str(plan.schedule), described(plan), str(plan.micro_batches)), plan.predicted.step_s
        medians = [statistics.median(run) for run in turns]
        ratios = [own / best for own, best in zip(medians, solved_turns, strict=True)]
        table.add_row(
            name, *what, f"{predicted_s:.3f}" if predicted_s else "", f"{median:.3f}", f"{high - low:.3f}",
            f"{100 * (predicted_s / median - 1):+.1f}" if predicted_s else "",
            " ".join(f"{each:.2f}" for each in medians), f"{statistics.median(ratios):.2f}x",
        )  # fmt: skip
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
