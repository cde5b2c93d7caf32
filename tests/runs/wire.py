"""One rank that trains until its run fails: what is said of the failure, and when, goes to FOLDER/RANK.

assigner lab CLUSTER -- tests/runs/wire.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from assigner import Pipeline, WorkerError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)
made = skips()
plan = make_plan(made, [(0, ["parts.0"]), (1, ["parts.1", "parts.2"]), (2, ["last"])])
batch = made.make_batch(8, 0)
try:
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        while True:
            pipeline.step(batch)
            if pipeline.steps == 5:
                (folder / f"ready.{rank}").touch()
except WorkerError as error:
    (folder / f"said.{rank}").write_text(f"{time.time()} {error}")
    sys.exit(error.exit_code)
