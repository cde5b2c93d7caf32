"""What a trace costs: the same training, in turn with and without one, in one run of two local ranks.

    python benchmarks/trace/run.py

Takes about six minutes on a quiet machine; where others compute too, the processor time of rank 0 still tells.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
CASES = {
    "tiny": ("examples/gpt.py:workload(width=32,heads=2,blocks=4,context=16,batch_size=16)", 8),
    "real": ("examples/gpt.py:workload(width=128,blocks=12,context=64,batch_size=16)", 8),
}


def measured(workload: str, micro_batches: int, pairs: int) -> dict[str, Any]:
    """What rank 0 of one run found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        options = {"--ranks": RANKS, "--micro-batches": micro_batches, "--pairs": pairs, "--out": out}
        subprocess.run(
            [
                sys.executable, *launcher, str(Path(__file__).with_name("alternate.py")), workload,
                *(str(word) for option in options.items() for word in option),
            ],
            check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def bounds(count: int) -> tuple[int, int]:
    """Which two of so many sorted figures have their median between them with 95 %: order statistics of a binomial."""
    half = 0.98 * math.sqrt(count)
    return max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))


def main() -> None:
    """Run both cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="of a step with a trace and one without")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    columns = "case", "step ms", "actions", "clock", "ratio", "of the median, 95 %", "IQR", "warm note us"
    table = Table(*columns, box=None)
    for name in args.cases:
        found = measured(*CASES[name], args.pairs)
        for clock in ("wall", "cpu"):
            on, off = found[clock]["on"], found[clock]["off"]
            ratios = sorted(with_trace / without for with_trace, without in zip(on, off, strict=True))
            low, middle, high = quantiles(ratios, n=4, method="inclusive")
            first, last = bounds(len(ratios))
            table.add_row(
                name, f"{1e3 * median(off):.2f}", f"{found['actions']:.0f}", clock, f"{middle:.4f}",
                f"{ratios[first]:.4f} to {ratios[last]:.4f}", f"{low:.3f} to {high:.3f}",
                f"{1e6 * found['note_s']:.1f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
