"""On two ranks: training without end, until a rank leaves as it is asked to, or its launcher is gone.

    assigner run PLAN -- tests/runs/leaving.py FOLDER [RANK WAY]

Ways to leave: `before` the run is joined; after two steps `abruptly`, `normally`, or `early` by the pipeline's end.
`by a fork`: it stays, and the fork makes a call, and leaves the pipeline's block; all have their end after four steps.
Writes FOLDER/RANK when a rank has made two steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from assigner import AssignerError, Pipeline, UsageError, launched_rank, tell

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

folder = Path(sys.argv[1])
leaver, way = (int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 2 else (-1, "")
rank = launched_rank()
made = skips()
plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])


def have_fork_call(pipeline: Pipeline) -> None:
    """A call in a fork of this rank is refused."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        pipeline.step(made.make_batch(8, 0))
    except UsageError as error:
        sys.exit("is a fork of worker:" not in error.message)
    sys.exit(1)


def train() -> None:
    """Steps, of which one rank makes two."""
    with Pipeline(made, plan, timeout_s=600, graph=graph_of(made)) as pipeline:
        for step in range(1_000_000):
            if step == 2:
                (folder / str(rank)).write_text(str(os.getpid()))
            if step == 2 and rank == leaver and way == "abruptly":
                os._exit(0)
            if step == 2 and rank == leaver and way == "normally":
                sys.exit(0)
            if step == 2 and rank == leaver and way == "early":
                return
            if way == "by a fork" and step == 2 and rank == leaver:
                have_fork_call(pipeline)
            if way == "by a fork" and step == 4:
                return
            pipeline.step(made.make_batch(8, 0))


if rank == leaver and way == "before":
    sys.exit(0)
try:
    train()
except AssignerError as error:
    sys.exit(tell(error))
