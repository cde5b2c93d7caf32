"""Train any workload under a plan: an ordinary loop in which `pipeline.step(batch)` is forward, backward and update.

assigner run plan.json -- examples/train.py --steps 50
torchrun --nproc-per-node 2 examples/train.py --plan plan.json --steps 50
mpirun -n 2 python examples/train.py --plan plan.json --steps 50        (srun likewise)
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import assigner

if TYPE_CHECKING:
    from collections.abc import Sequence

REMAT = ("plan", "always", "except_last", "never")
LINE_EVERY_S = 2.0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a workload under a plan; start it on as many ranks as needed.")
    parser.add_argument("--plan", default=os.environ.get("ASSIGNER_PLAN"), help="default: $ASSIGNER_PLAN")
    parser.add_argument("--workload", metavar="FILE.py:FUNCTION", help="default: the plan's own")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", type=setting, action="append", default=[],
        help="a setting of the workload in place of the plan's, as learning_rate=3e-4",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, help="rows in a step; default: the plan's")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip the gradients of all ranks to this norm")
    parser.add_argument("--remat", choices=REMAT, default="plan", help="which partitions rematerialise")
    parser.add_argument("--no-memory-check", action="store_true", help="run a plan that is predicted not to fit, too")
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--resume", metavar="DIR", help="start from a checkpoint, of this or another plan")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write losses and step times (replaces it)")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write what every rank did in the last 20 steps")
    options = parser.parse_args(arguments)
    if options.steps < 1 or (options.batch_size is not None and options.batch_size < 1):
        parser.error("--steps and --batch-size are 1 or more")
    if options.clip is not None and not options.clip > 0:
        parser.error("--clip is more than 0")
    if options.save and Path(options.save).exists():
        parser.error(f"--save: {options.save} exists")
    if options.trace and options.trace.exists():
        parser.error(f"--trace: {options.trace} exists")
    return options


def setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` as a name and a plain value: a Python literal, or else text."""
    name, separator, value = text.partition("=")
    if not (name.isidentifier() and separator):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def train(options: argparse.Namespace) -> None:
    """Train, with progress and a summary from rank 0."""
    plan = assigner.load_plan(options.plan)
    settings = dict(options.set)
    workload = assigner.load_workload(options.workload or plan.workload.entry, **settings)
    rows = options.batch_size or settings.get("batch_size", plan.workload.batch_size)
    if options.trace and rows != plan.workload.batch_size:
        raise assigner.UsageError(f"--trace: of the plan's {plan.workload.batch_size} rows a step, not {rows}")
    losses: list[float] = []
    seconds: list[float] = []
    with assigner.Pipeline(workload, plan, remat=options.remat, check_memory=not options.no_memory_check) as pipeline:
        if options.resume:
            pipeline.load(options.resume)
        progress = Progress(options.steps, rows, silent=pipeline.rank != 0)
        with pipeline.trace(options.trace) if options.trace else contextlib.nullcontext():
            for _ in range(options.steps):
                batch = workload.make_batch(rows, seed=workload.seed + 1 + pipeline.steps)
                start = time.perf_counter()
                losses.append(pipeline.step(batch, max_norm=options.clip))
                seconds.append(time.perf_counter() - start)
                progress.show(losses, seconds)
        if options.save:
            pipeline.save(options.save)
        if pipeline.rank == 0:
            as_planned = rows == plan.workload.batch_size and options.remat == "plan"
            predicted_s = plan.predicted.step_s if plan.predicted and as_planned else None
            report(options, losses, seconds, predicted_s)


class Progress:
    """Lines on stderr, at most one every two seconds; on a terminal one line that changes."""

    def __init__(self, steps: int, rows: int, *, silent: bool) -> None:
        self.steps, self.rows, self.silent = steps, rows, silent
        self.live = sys.stderr.isatty()
        self.shown_at = 0.0

    def show(self, losses: Sequence[float], seconds: Sequence[float]) -> None:
        """Where training is after its latest step."""
        done, now = len(losses), time.perf_counter()
        is_last = done == self.steps
        if self.silent or not (self.live or done == 1 or is_last or now - self.shown_at >= LINE_EVERY_S):
            return
        self.shown_at = now
        step_s = typical(seconds)
        line = (
            f"step {done:>{len(str(self.steps))}}/{self.steps}  loss {losses[-1]:.4f}  {1e3 * step_s:.0f} ms a step  "
            f"{self.rows / step_s:.1f} samples/s  {(self.steps - done) * step_s:.0f} s left"
        )
        start, end = ("\r\x1b[K", "\n" if is_last else "") if self.live else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)


def typical(seconds: Sequence[float]) -> float:
    """The median step, without the first one, which sets up connections and memory."""
    return statistics.median(seconds[1:] or seconds)


def report(
    options: argparse.Namespace, losses: Sequence[float], seconds: Sequence[float], predicted_s: float | None
) -> None:
    """The summary, and the numbers for scripts."""
    step_s = typical(seconds)
    predicted = f", predicted {1e3 * predicted_s:.0f} ms" if predicted_s is not None else ""
    print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; "
        f"{1e3 * step_s:.0f} ms a step (median){predicted}",
        flush=True,
    )
    if options.save:
        print(f"checkpoint: {options.save}", flush=True)
    if options.trace:
        print(f"trace: {options.trace}", flush=True)
    if options.json:
        numbers = {"losses": losses, "step_s": seconds, "median_step_s": step_s, "predicted_step_s": predicted_s}
        options.json.write_text(json.dumps({"plan": options.plan, "remat": options.remat, **numbers}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; give the exit code."""
    try:
        train(parse_options(arguments))
    except assigner.AssignerError as error:
        return assigner.tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
