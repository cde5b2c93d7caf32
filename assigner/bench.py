"""A plan's workload trained for some steps, with a trace: what `assigner bench` starts on every rank.

python -m assigner.bench PLAN TRACE --steps 20 --warm-up 2
"""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import AssignerError
from assigner.formats.document import UnknownFieldWarning
from assigner.formats.plan import load_plan
from assigner.launch.failurereport import tell
from assigner.model.workload import load_workload
from assigner.runtime.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence


def train(plan: Path, trace: Path, *, steps: int, warm_up: int) -> None:
    """Train the plan's own workload as this rank, `warm_up` steps and then those of the trace, which rank 0 writes.

    Raises:
        AssignerError: the workload cannot be loaded, does not fit the plan, or another rank failed.
    """
    with warnings.catch_warnings(action="ignore", category=UnknownFieldWarning):  # the command has said that
        found = load_plan(plan)
    workload = load_workload(found.workload.entry)

    def step(number: int) -> None:
        pipeline.step(workload.make_batch(found.workload.batch_size, seed=workload.seed + 1 + number))

    with Pipeline(workload, found) as pipeline:
        for number in range(warm_up):
            step(number)
        with pipeline.trace(trace, last=steps):
            for number in range(warm_up, warm_up + steps):
                step(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; give the exit code."""
    parser = argparse.ArgumentParser(prog="python -m assigner.bench", description="Train a plan for some steps.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    given = parser.parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # what the user's code prints is no result
            train(given.plan, given.trace, steps=given.steps, warm_up=given.warm_up)
    except AssignerError as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
