"""Solved plan against equal split on the lab's unlike hosts: predicted and measured step times, in turn.

    python benchmarks/heterogeneous/run.py --cluster mixed3 --out /tmp/mixed3

Profiles the workload on the cluster, solves, and trains under all plans, `--rounds` times in turn. Needs root, and a
machine with nothing else running: the hosts' CPU shares must be theirs.
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

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def on_lab(args: argparse.Namespace, *command: str, timeout: int) -> None:
    """One command on every host of the cluster, as ranks of one run."""
    assigner("lab", str(args.clusters / f"{args.cluster}.toml"), "--timeout", str(timeout), "--", *command)


def assigner(*arguments: str) -> None:
    """One command of the program on this machine."""
    subprocess.run([str(BIN / "assigner"), *arguments], check=True, cwd=ROOT)


def main() -> None:
    """Profile, solve, train in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=Path, default=ROOT / "examples" / "clusters", help="folder of cluster files")
    parser.add_argument("--cluster", default="mixed3")
    parser.add_argument("--workload", default="examples/gpt.py:workload(width=256,context=128)")
    parser.add_argument("--schedules", nargs="+", default=["auto", "gpipe"], help="one solved plan for each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep-profile", action="store_true", help="use the profile that is in --out already")
    args = parser.parse_args()
    args.clusters, args.out = args.clusters.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    profile = args.out / "profile.json"
    if not args.keep_profile:
        on_lab(args, "assigner", "profile", args.workload, "-o", str(profile), "--force", timeout=1200)
    plans = {f"solved, {schedule}": args.out / f"{schedule}.json" for schedule in args.schedules}
    for schedule, plan in zip(args.schedules, plans.values(), strict=True):
        assigner("solve", str(profile), "-o", str(plan), "--schedule", schedule, "--force")
    plans["equal split"] = args.out / "equal.json"
    assigner("solve", str(profile), "-o", str(plans["equal split"]), "--baseline", "equal", "--force")
    times: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(args.rounds):
        for name, plan in plans.items():
            result = args.out / f"{plan.stem}-{turn}.json"
            on_lab(
                args, "assigner", "run", str(plan), "--", "examples/train.py", "--steps", str(args.steps),
                "--json", str(result), timeout=1200,
            )  # fmt: skip
            times[name] += json.loads(result.read_text())["step_s"][2:]  # the first steps warm up
    show(plans, times)


def show(plans: dict[str, Path], times: dict[str, list[float]]) -> None:
    """The table: predicted and measured, and the ratio between the plans."""
    table = Table("plan", "schedule", "stages", "M", "predicted s", "measured s (median)", "IQR s", "error %", "steps")
    medians = {}
    for name, path in plans.items():
        plan = json.loads(path.read_text())
        medians[name] = statistics.median(times[name])
        low, _, high = statistics.quantiles(times[name], n=4, method="inclusive")
        predicted = plan["predicted"]["step_s"]
        stages = " ".join(f"{stage['worker'].split('/')[0]}:{len(stage['partitions'])}" for stage in plan["stages"])
        table.add_row(
            name, plan["schedule"], stages, str(plan["micro_batches"]),
            f"{predicted:.3f}", f"{medians[name]:.3f}", f"{high - low:.3f}",
            f"{100 * (predicted / medians[name] - 1):+.1f}", str(len(times[name])),
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for name, median in medians.items():
        if name != "equal split":
            console.print(f"equal split / {name}: {medians['equal split'] / median:.2f}x measured")


if __name__ == "__main__":
    main()
