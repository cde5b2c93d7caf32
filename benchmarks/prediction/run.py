"""Predicted and measured: step time, order of plans and peak memory, of several models and plans on several clusters.

    python benchmarks/prediction/run.py --out /tmp/prediction

For each case: profile the model on its workers, make ten plans, train under each in turn, compare with the traces.
`--only mixed3` runs the cases whose name holds the word, `--keep-profiles` measures nothing that is in --out already.
The cases of the lab need root. The machine must have nothing else to do: the hosts' CPU shares must be theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cases import CASES, Case
from plans import make_plans
from table import compared, markdown, summary

from assigner.formats.plan import save_plan
from assigner.formats.profile import load_profile

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CLUSTERS = ROOT / "examples" / "clusters"
TRIAL = Path(__file__).with_name("trial.py")

RESERVE = "0.15"  # of what is free: a run is the fork of a process that has the model, and both hold some


def on_workers(case: Case, *command: str) -> None:
    """A command once per rank of one run, on the case's cluster.

    The lab starts a script as it starts a profile. Under torchrun its agent would be on the host, too, and what was
    free for the profile would not be for the plan.
    """
    start = [str(BIN / "assigner"), "lab", str(CLUSTERS / f"{case.cluster}.toml"), "--timeout", "1800", "--"]
    if not case.cluster:
        start = [] if command[0] == "assigner" else ["torchrun", "--standalone", "--nproc-per-node", str(case.ranks)]
    print(f"$ {' '.join([*start, *command])}", flush=True)
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    subprocess.run([*start, *command], check=True, cwd=ROOT, env=environment)


@contextlib.contextmanager
def occupied(cores: float) -> Iterator[None]:
    """Meanwhile another program is busy for this share of the time, 50 ms at once."""
    if not cores:
        yield
        return
    rest = 0.05 * (1 / cores - 1)
    lines = ["import time", "while True:", " t = time.perf_counter() + 0.05", " while time.perf_counter() < t: pass"]
    other = subprocess.Popen([sys.executable, "-c", "\n".join([*lines, f" time.sleep({rest})"])])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def run(case: Case, out: Path, *, rounds: int, keep_profiles: bool) -> None:
    """Profile, plan and train one case; everything goes into its folder."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "profile.json"
    if not (keep_profiles and path.exists()):
        ranks = () if case.cluster else ("--workers", str(case.ranks))
        on_workers(case, "assigner", "profile", case.entry, "-o", str(path), "--force", "--reserve", RESERVE, *ranks)
    plans = {}
    for name, plan in make_plans(load_profile(path), case.plans).items():
        plans[name] = out / f"{name.replace(' ', '-').replace(',', '')}.json"
        save_plan(plan, plans[name], force=True)
    flags = ["--out", str(out), "--rounds", str(rounds), "--steps", str(case.steps)]
    with occupied(case.busy):
        on_workers(case, str(TRIAL), *flags, case.entry, *map(str, plans.values()))
    (out / "plans.txt").write_text("".join(f"{name}\t{path.name}\n" for name, path in plans.items()))


def main() -> None:
    """Run the cases, print the tables, and write them to RESULTS.md in --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="words: the cases with one of them in their names")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep-profiles", action="store_true")
    parser.add_argument("--no-run", action="store_true", help="print the tables of what is in --out already")
    args = parser.parse_args()
    cases = [case for case in CASES if any(word in case.name for word in args.only)]
    rows = []
    for case in cases:
        folder = args.out.resolve() / case.name
        if not args.no_run:
            run(case, folder, rounds=args.rounds, keep_profiles=args.keep_profiles)
        found = compared(case, folder)
        rows += found
        print(markdown(found), flush=True)
    text = f"{markdown(rows)}\n{summary(rows)}"
    (args.out / "RESULTS.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
