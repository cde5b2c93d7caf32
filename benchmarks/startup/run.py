"""How long a command takes as a whole process, beside an interpreter that does nothing.

    python benchmarks/startup/run.py                   20 rounds, a minute on a quiet machine
    python benchmarks/startup/run.py --rounds 5

Every round runs every command once, in an order that is drawn anew, so that what else the machine does falls on all of
them alike. Two rounds warm up and do not count. Wall time is from before the process starts until it has ended;
processor time is its own and its children's, user and system. Exit code 1 if a median is over its limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from builders import make_profile  # noqa: E402 - found there

from assigner.formats.profile import save_profile  # noqa: E402

WARM_UP = 2
SAMPLES = ROOT / "profiles" / "mixed3-gpt"


@dataclass
class Case:
    """One command: what it is called, what is run, and the most that its median may be."""

    name: str
    arguments: list[str]
    limit_s: float | None = None
    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def run(self) -> tuple[float, float]:
        """Wall and processor seconds of one process."""
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *self.arguments], check=True, capture_output=True, cwd=ROOT)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def row(self) -> str:
        """One row of the table."""
        limit = "" if self.limit_s is None else f"{self.limit_s:g}"
        times = f"{statistics.median(self.wall_s):.3f} | {_iqr(self.wall_s):.3f} | {min(self.wall_s):.3f}"
        processor = f"{statistics.median(self.processor_s):.3f} | {_iqr(self.processor_s):.3f}"
        return f"| {self.name} | {times} | {processor} | {limit} |"


def _iqr(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def cases(folder: Path) -> list[Case]:
    """The commands, and the files that they read in `folder`."""
    chain = make_profile(work=[2e-3 * (1 + n % 3) for n in range(12)], slowness=[1.0, 1.0, 2.0, 3.0], batch=16)
    save_profile(chain, folder / "chain.json")
    command, plan, equal = ["-m", "assigner_cli"], str(SAMPLES / "plan.json"), str(SAMPLES / "equal.json")
    solve = [*command, "solve", str(folder / "chain.json"), "-o", str(folder / "plan.json"), "--force"]
    return [
        Case("python -c pass", ["-c", "pass"]),
        Case("assigner --help", [*command, "--help"], 0.25),
        Case("assigner solve --help", [*command, "solve", "--help"], 0.25),
        Case("assigner show (a profile)", [*command, "show", str(SAMPLES / "profile.json")], 0.4),
        Case("assigner show (a plan)", [*command, "show", plan], 0.4),
        Case("assigner compare (two plans)", [*command, "compare", equal, plan], 0.4),
        Case("assigner solve (12 partitions, 4 workers)", solve, 3.0),
    ]


def main() -> int:
    """Measure, print a Markdown table, and say what is over its limit."""
    parser = argparse.ArgumentParser(description="Whole-process times of commands.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        each = cases(Path(folder))
        for number in range(WARM_UP + rounds):
            for case in random.sample(each, len(each)):
                wall, processor = case.run()
                if number >= WARM_UP:
                    case.wall_s.append(wall)
                    case.processor_s.append(processor)
    load.append(os.getloadavg()[0])
    print(
        "| command | wall s | IQR | least | processor s | IQR | limit s |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for case in each:
        print(case.row())
    print(
        f"\n{rounds} rounds; {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}; load {load[0]:.1f} before, {load[1]:.1f} after"
    )
    over = [case.name for case in each if case.limit_s is not None and statistics.median(case.wall_s) > case.limit_s]
    for name in over:
        print(f"over its limit: {name}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
