"""This runtime beside its peers: the same model, split and ranks, in turn, in one run.

    python benchmarks/runtime/run.py

About six minutes on a quiet machine with two cores; nothing else may compute meanwhile.
`pip install -e '.[benchmarks]'` brings torchgpipe, which is left out where it is missing.
The tables can be pasted into the README.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cases import PREDICTED, QUICK, REAL, REMAT, SHARED, TINY, Case
from measure import measure_peaks, measure_predicted, measure_turns
from rich.console import Console
from tables import predicted_table, real_table, remat_table, tiny_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

CHOICES = ("tiny", "real", "shared", "remat", "predicted")


def environment() -> str:
    """The machine, in one line."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{os.cpu_count()} cores ({model}), {platform.system()} {platform.release()}, Python"
        f" {platform.python_version()}, torch {torch.__version__}, gloo, one thread a rank;"
        f" {time.strftime('%d %B %Y')},"
        f" load before: {load}"
    )


def adapted(case: Case, *, rounds: int | None, quick: bool) -> Case:
    """A case with as many rounds as asked for; `quick`: with a small model, and three rounds."""
    if quick:
        return replace(case, entry=QUICK.get(case.entry, case.entry), rounds=rounds or 3, steps=1)
    return replace(case, rounds=rounds or case.rounds)


def run(names: Sequence[str], *, rounds: int | None, quick: bool) -> tuple[dict[str, Any], list[tuple[str, Table]]]:
    """All figures, and their tables with titles."""
    count = 1 if quick else None
    tiny, real, shared = (
        [adapted(case, rounds=rounds, quick=quick) for case in each[:count]] for each in (TINY, REAL, SHARED)
    )
    remat, predicted = (adapted(case, rounds=rounds, quick=quick) for case in (REMAT, PREDICTED))
    found: dict[str, Any] = {"environment": environment()}
    tables = []
    if "tiny" in names:
        found["tiny"] = {case.name: measure_turns(case) for case in tiny}
        tables.append(("Tiny stage", tiny_table(tiny, found["tiny"])))
    for name, cases, title in (("real", real, "Real sizes"), ("shared", shared, "Data parallel")):
        if name in names:
            found[name] = {case.name: measure_turns(case) for case in cases}
            found[f"{name}_peak_bytes"] = {case.name: measure_peaks(case) for case in cases}
            tables.append((title, real_table(found[name], found[f"{name}_peak_bytes"])))
    if "remat" in names:
        found["remat_peak_bytes"] = measure_peaks(remat, remat=True)
        tables.append(
            (f"Peak MiB of {remat.name}, gpipe, M={remat.micro_batches}", remat_table(found["remat_peak_bytes"]))
        )
    if "predicted" in names:
        found["predicted"] = measure_predicted(predicted)
        tables.append((f"{predicted.name}: what the simulator says is possible", predicted_table(found["predicted"])))
    return found, tables


def main() -> int:
    """Run the cases, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--rounds", type=int, help="turns of every contender; default: 40 tiny, 16 real")
    parser.add_argument("--quick", action="store_true", help="few and small models, three rounds: does it work?")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure of every round")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 2:
        parser.error("--rounds is 2 or more")
    if importlib.util.find_spec("torchgpipe") is None:
        print("torchgpipe is left out: it is not installed (pip install -e '.[benchmarks]')", file=sys.stderr)
    begin = time.monotonic()
    try:
        found, tables = run(args.cases, rounds=args.rounds, quick=args.quick)
    except subprocess.CalledProcessError as error:
        print(f"error: a run ended with {error.returncode}; what it said is above", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(found))
    console = Console(width=200)
    console.print(f"\n{found['environment']}\n", highlight=False)
    for title, table in tables:
        with console.capture() as shown:
            console.print(table)
        lines = "\n".join(line.rstrip() for line in shown.get().splitlines()).strip()
        print(f"**{title}**\n\n{lines}\n")
    print(f"took {(time.monotonic() - begin) / 60:.1f} min", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
