"""On two ranks: a model under autocast in two stages against the plain one; a rank that finds a difference fails.

torchrun --nproc-per-node 2 tests/runs/casts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from assigner import Pipeline

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from mixed_precision import Mixed, make_workload, plain_step
from workloads import Skips, graph_of, make_plan

STAGES = {
    Mixed: [(0, ["blocks.0"]), (1, ["blocks.1", "head"])],
    Skips: [(1, ["parts.0", "parts.1"]), (0, ["parts.2", "last"])],
}

for model, stages in STAGES.items():
    made = make_workload(model)
    torch.manual_seed(made.seed)
    plain = made.model()
    batch = made.make_batch(8, 0)
    expected = plain_step(made, plain, batch, micro_batches=4)
    with Pipeline(
        made, make_plan(made, stages, micro_batches=4, remat=["parts.1", "blocks.1"]), graph=graph_of(made)
    ) as pipeline:
        loss, gradients, named = pipeline.step(batch), pipeline.gradients(), dict(plain.named_parameters())
        assert abs(loss - expected) < 1e-6, (loss, expected)
        assert gradients
        assert all(torch.equal(each, named[name].grad) for name, each in gradients.items())
