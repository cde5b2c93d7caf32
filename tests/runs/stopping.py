"""On two ranks: training until a signal asks to stop, then an evaluation and a checkpoint.

    assigner run PLAN -- tests/runs/stopping.py FOLDER [HOW]

Writes FOLDER/RANK, its process id, when a rank has made two steps and asked once, and FOLDER/RANK.json at the end.
HOW: `unasked` never asks; `stays` does not end after the request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from assigner import AssignerError, Pipeline, launched_rank, tell

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

folder, how = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
rank = launched_rank()
made = skips()
plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])


def train() -> None:
    """Steps until somebody asks to stop."""
    with Pipeline(made, plan, timeout_s=600, graph=graph_of(made)) as pipeline:
        for step in range(1_000_000):
            pipeline.step(made.make_batch(8, 0))
            if how != "unasked" and pipeline.stop_requested(grace_s=2.0 if how == "stays" else 600.0):
                break
            if step == 2:
                (folder / str(rank)).write_text(str(os.getpid()))
        if how == "stays":
            time.sleep(3600)
        loss = pipeline.evaluate(made.make_batch(8, 1))
        pipeline.save(folder / "at the end")
        (folder / f"{rank}.json").write_text(json.dumps({"steps": pipeline.steps, "loss": loss}))


try:
    train()
except AssignerError as error:
    sys.exit(tell(error))
