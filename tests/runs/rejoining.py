"""On two ranks: pipelines one after another in one process, each in a process group of its own; rank 0 ends first.

torchrun --nproc-per-node 2 tests/runs/rejoining.py, or as a rank of mpirun or srun
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from assigner import Pipeline, launched_rank

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

made = skips()
plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])
batch = made.make_batch(8, 0)
losses = []
for _ in range(6):
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        losses.append(pipeline.step(batch))
    if launched_rank() == 1:
        time.sleep(0.2)  # rank 0 is in the next group's rendezvous before rank 1 has written its new address
assert losses == losses[:1] * 6, losses
if launched_rank() == 1:
    time.sleep(1.0)  # rank 0 has ended, and with it a store that no launcher keeps
