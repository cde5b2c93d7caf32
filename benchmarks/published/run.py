"""Training runs on unlike GPUs that others measured, beside what this program says of them.

    python benchmarks/published/run.py FOLDER [--solve] [--waiting both] [--picture FILE.svg]

FOLDER holds `opt350-profile.json`, `rtx-plans.json` and `gh200-plans.json`; README.md says where they come from. Prints
Markdown tables: step time and peak memory of each run, and with `--solve` the faster plans on the same nodes.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from gains import gain
from picture import scatter
from pricing import Groups, Price, left_out
from sailor import WAITING, Measured, Run, read_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gains import Gain, Solved
    from sailor import Node

PROFILE = "opt350-profile.json"
SETS = {"RTX": "rtx-plans.json", "GH200": "gh200-plans.json"}
COPIED = {("RTX", "N3_D1")}
"""Runs with the figures of another one, N6_D2: one node a stage has no all-reduce, and N3_D1 names one of 5.5 s."""

MOST_NODES = 8
"""Of a run whose nodes the solver gets: without replicas it has no use for more of them with 26 layers."""


@dataclass(frozen=True)
class Row:
    """One run with its price.

    Args:
        of: Its set.
        run: What was measured.
        price: What this program says.
        constant: Bytes beside the tensors on each GPU, as fitted to the set's other runs.
    """

    of: str
    run: Run
    price: Price
    constant: float

    @property
    def counts(self) -> bool:
        """False for a copy of another run."""
        return (self.of, self.run.name) not in COPIED

    @property
    def step_error(self) -> float:
        """(predicted - measured) / measured, of the step."""
        return self.price.step_s / self.run.step_s - 1

    @property
    def peak_error(self) -> float:
        """The same of the peak."""
        return (self.price.tensor_bytes + self.constant) / self.run.peak_bytes - 1


def rows_of(measured: Measured, of: str, runs: Sequence[Run]) -> tuple[list[Row], float]:
    """The rows of a set, and the constant of all its runs; a copied run has no part in any constant."""
    prices = {
        run.name: Groups(
            measured, run.replicas, micro_batch_size=run.micro_batch_size, micro_batches=run.micro_batches
        ).price(run.cuts)
        for run in runs
    }  # fmt: skip
    fitted = [run for run in runs if (of, run.name) not in COPIED]
    residues = [run.peak_bytes - prices[run.name].tensor_bytes for run in fitted]
    constant = statistics.median(residues)
    others = dict(zip((run.name for run in fitted), left_out(residues), strict=True))
    return [Row(of, run, prices[run.name], others.get(run.name, constant)) for run in runs], constant


def nodes_text(nodes: Sequence[Node]) -> str:
    """Nodes side by side, runs of like ones as a number."""
    short = {"RTX-2080": "2080", "RTX-3090": "3090", "Titan-RTX": "Titan", "GH-96": "GH200"}
    counted = ((short[gpu], len(list(same))) for gpu, same in groupby(node.gpu for node in nodes))
    return "+".join(f"{count}x{gpu}" if count > 1 else gpu for gpu, count in counted)


def stages_text(run: Run) -> str:
    """Layers of each stage and who holds it."""
    return ", ".join(f"{cut}: {nodes_text(nodes)}" for cut, nodes in zip(run.cuts, run.replicas, strict=True))


def table(rows: Sequence[Row]) -> str:
    """One row for each run."""
    lines = [
        "| run | stages | M x rows | step s | priced | error | all-reduce s | priced | peak GB | priced | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        run, price = row.run, row.price
        lines.append(
            f"| {row.of} {run.name}{'' if row.counts else ' (copy)'} | {stages_text(run)}"
            f" | {run.micro_batches} x {run.micro_batch_size} | {run.step_s:.3f} | {price.step_s:.3f}"
            f" | {row.step_error:+.1%} | {run.all_reduce_s:.3f} | {price.reduce_s:.3f} | {run.peak_bytes / 1e9:.1f}"
            f" | {price.tensor_bytes / 1e9:.1f} + {row.constant / 1e9:.1f} | {row.peak_error:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Errors by set, copies left out."""
    lines = [
        "| set | runs | step, median error | worst | peak, median error | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for of in (*SETS, "both"):
        mine = [row for row in rows if row.counts and of in (row.of, "both")]
        step, peak = ([abs(getattr(row, name)) for row in mine] for name in ("step_error", "peak_error"))
        lines.append(
            f"| {of} | {len(mine)} | {statistics.median(step):.1%} | {max(step):.1%}"
            f" | {statistics.median(peak):.1%} | {max(peak):.1%} |"
        )
    return "\n".join(lines) + "\n"


def solved_text(solved: Solved) -> str:
    """Layers of each stage, who holds it, and the micro-batches of replicas that have unlike shares."""
    texts = []
    for stage, nodes in zip(solved.plan.stages, solved.nodes, strict=True):
        counts = [each.micro_batches for each in stage.replicas]
        shares = f" ({'+'.join(map(str, counts))})" if len(set(counts)) > 1 else ""
        texts.append(f"{len(stage.partitions)}: {nodes_text(nodes)}{shares}")
    return ", ".join(texts)


def gains_table(gains: Sequence[tuple[str, Gain]]) -> str:
    """One row for each run."""
    lines = [
        "| run | step s | priced | best cuts | gain | layers | solved | gain | layers: nodes |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for of, found in gains:
        was, solved = found.price.step_s, found.solved
        lines.append(
            f"| {of} {found.run.name} | {found.run.step_s:.2f} | {was:.2f} | {found.cut_price.step_s:.2f}"
            f" | {1 - found.cut_price.step_s / was:.0%} | {' + '.join(map(str, found.cuts))} | {solved.step_s:.2f}"
            f" | {1 - solved.step_s / was:.0%} | {solved_text(solved)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Price all runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--waiting", choices=tuple(WAITING), default="later", help="who waits for a message")
    parser.add_argument("--picture", type=Path, help="an SVG of predicted against measured steps")
    parser.add_argument("--solve", action="store_true", help="faster plans on the same nodes; takes minutes")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds of one call of the solver")
    args = parser.parse_args()
    lacking = [name for name in (PROFILE, *SETS.values()) if not (args.folder / name).is_file()]
    if lacking:
        parser.error(
            f"{args.folder}: no file {', '.join(lacking)}; benchmarks/published/README.md says how to make them"
        )
    measured = Measured(args.folder / PROFILE, waiting=args.waiting)
    rows, gains = [], []
    for of, file in SETS.items():
        runs = read_runs(args.folder / file)
        mine, constant = rows_of(measured, of, runs)
        rows += mine
        if args.solve:
            gains += [
                (of, gain(measured, row.run, reserve=constant, limit_s=args.limit))
                for row in mine if row.counts and 1 < sum(map(len, row.run.replicas)) <= MOST_NODES
            ]  # fmt: skip
    print(table(rows))
    print(summary(rows))
    if gains:
        print(gains_table(gains))
    if args.picture:
        args.picture.write_text(
            scatter([(row.of, row.run.name, row.run.step_s, row.price.step_s) for row in rows if row.counts])
        )


if __name__ == "__main__":
    main()
