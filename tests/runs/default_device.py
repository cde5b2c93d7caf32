"""On two ranks: a script whose default device is another one than the workers'; what it does not name is not there.

    torchrun --nproc-per-node 2 tests/runs/default_device.py FOLDER

Writes FOLDER/RANK.json: case -> how far the losses lie from the plain model's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from assigner import Pipeline

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import Reference, graph_of, language, make_plan, skips

if TYPE_CHECKING:
    from assigner import Workload
    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph


def train(made: Workload, plan: Plan, graph: PartitionGraph | None = None) -> float:
    """The largest difference of a loss over some steps, with all that ranks tell each other meanwhile."""
    reference, worst, batches = Reference(made), 0.0, [made.make_batch(rows, n) for n, rows in enumerate((8, 7))]
    with Pipeline(made, plan, graph=graph) as pipeline:
        for batch in batches:
            torch.set_default_device("meta")
            try:
                found = pipeline.step(batch, update=False)
                pipeline.clip_grad_norm_(1e9)
                pipeline.optimizer.step()
                pipeline.forward(batch[0], to=None)
                pipeline.state_dict()
            finally:
                torch.set_default_device(None)
            worst = max(worst, abs(found - reference.step(batch)))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    tied, shared = language(), skips()
    halves = make_plan(tied, [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])])
    worst = {
        "tied": train(tied, halves, graph_of(tied)),
        "skips": train(shared, make_plan(shared, [(0, ["parts.0"]), (1, ["parts.1", "parts.2", "last"])])),
    }
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(worst))


if __name__ == "__main__":
    main()
