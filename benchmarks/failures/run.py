"""Kill -9 of each rank in turn at a random moment, on three hosts of the lab: when does the run end, and who is named?

    python benchmarks/failures/run.py --times 30

Needs root (the lab). A run takes about 20 s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
HOSTS = "abc"
LONGEST_S = {"starting": 5.0, "capture": 0.2, "first step": 0.05, "training": 1.5, "saving": 0.05, "closing": 0.5}
"""A kill comes at a random time of so many seconds after a phase has begun, and may hit a later one."""
GOAL_S = 10.0
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ending:
    """How a run ended after a kill.

    Args:
        phase: What the rank was doing when it was killed.
        ranks_s: Until the last rank's process was gone, in seconds.
        all_s: Until the launchers and the lab were gone too.
        faults: What was not as it should be.
        said: Everything on stdout and stderr.
    """

    phase: str
    ranks_s: float
    all_s: float
    faults: tuple[str, ...]
    said: str


def doing(folder: Path, rank: int) -> tuple[int, str]:
    """A rank's process and phase; (0, ""): it has not begun."""
    try:
        process, _, phase = (folder / str(rank)).read_text().partition(" ")
    except FileNotFoundError:
        return 0, ""
    return int(process), phase


def runs(process: int) -> bool:
    """True if there is such a process, and it is not only waiting to be buried."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def killed_run(victim: int, phase: str, wait_s: float) -> Ending | None:
    """Start a run and kill one of its ranks some time after a phase has begun; None: the rank was faster."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        folder = Path(name)
        lab = subprocess.Popen(
            [
                sys.executable, "-m", "assigner_cli", "lab", "--timeout", "120", str(HERE / "cluster.toml"), "--",
                str(HERE / "train.py"), name, str(victim),
            ],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            ending = _kill_and_wait(lab, folder, victim, phase, wait_s)
        finally:
            if lab.poll() is None:
                lab.terminate()
            lab.wait()
        output.seek(0)
        said = output.read()
    if ending is None:
        return None
    hit, ranks_s, all_s, left = ending
    faults = [f"still runs: worker:{rank}" for rank in left]
    if ranks_s > GOAL_S:
        faults.append(f"the ranks took {ranks_s:.1f} s")
    if lab.returncode != 7:
        faults.append(f"exit code {lab.returncode}")
    for rank, host in enumerate(HOSTS):
        lines = [line for line in said.splitlines() if line.startswith(f"[{host}]")]
        if rank != victim and not any(
            re.search(rf"worker:{victim}\b.*( failed: |; the ranks of this)", line) for line in lines
        ):
            faults.append(f"host {host} does not name worker:{victim}")
        if not any(
            re.search(rf"error: worker:({rank}|{victim}) (ended with exit code [1-9]|was|is)", each) for each in lines
        ):
            faults.append(f"host {host} ends without an error")
    return Ending(hit, ranks_s, all_s, tuple(faults), said)


def _kill_and_wait(
    lab: subprocess.Popen[bytes], folder: Path, victim: int, phase: str, wait_s: float
) -> tuple[str, float, float, list[int]] | None:
    """The phase that was hit, seconds to the end of the ranks and of all, and the ranks that run after that."""
    names = list(LONGEST_S)
    while (
        (now := doing(folder, victim)[1]) == ""
        or (now != "joining" and names.index(now) < names.index(phase))
        or (now == "joining" and names.index(phase) > names.index("capture"))
    ):
        if lab.poll() is not None:
            return None
        time.sleep(0.002)
    time.sleep(wait_s)
    process, hit = doing(folder, victim)
    if not runs(process):
        return None
    os.kill(process, signal.SIGKILL)
    start = time.monotonic()
    ranks_s = 0.0
    while lab.poll() is None and time.monotonic() < start + PATIENCE_S:
        if any(runs(doing(folder, rank)[0]) for rank in range(len(HOSTS))):
            ranks_s = time.monotonic() - start
        time.sleep(0.02)
    all_s = time.monotonic() - start
    return hit, ranks_s, all_s, [rank for rank in range(len(HOSTS)) if runs(doing(folder, rank)[0])]


def table_of(endings: list[Ending]) -> Table:
    """One row for each phase that was hit."""
    table = Table("phase", "kills", "ranks end s, median", "worst", "all end s, median", "worst", "faults", box=None)
    phases = dict.fromkeys(["starting", "capture", "joining", *LONGEST_S])
    for phase in [*phases, "all"]:
        found = [each for each in endings if phase in (each.phase, "all")]
        if found:
            ranks, everything = [each.ranks_s for each in found], [each.all_s for each in found]
            table.add_row(
                phase, str(len(found)), f"{median(ranks):.1f}", f"{max(ranks):.1f}", f"{median(everything):.1f}",
                f"{max(everything):.1f}", str(sum(bool(each.faults) for each in found)),
            )  # fmt: skip
    return table


def main() -> None:
    """Kill so many times, and print the table; exit code 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn, console = random.Random(args.seed), Console()  # noqa: S311 - no secret
    endings: list[Ending] = []
    attempt = 0
    while len(endings) < args.times:
        phase = list(LONGEST_S)[attempt % len(LONGEST_S)]
        victim = (attempt + attempt // len(LONGEST_S)) % len(HOSTS)
        attempt += 1
        ending = killed_run(victim, phase, drawn.uniform(0.0, LONGEST_S[phase]))
        if ending is None:
            console.print(f"worker:{victim}, {phase}: it was faster than the kill; again")
            continue
        endings.append(ending)
        verdict = "; ".join(ending.faults) or "as it should be"
        console.print(f"{len(endings)}: worker:{victim}, {ending.phase}: {ending.ranks_s:.1f} s, {verdict}")
        if ending.faults:
            console.print(ending.said, markup=False, highlight=False)
    console.print(table_of(endings))
    sys.exit(any(ending.faults for ending in endings))


if __name__ == "__main__":
    main()
