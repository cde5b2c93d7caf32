"""Five steps under $ASSIGNER_PLAN, as a rank of any launcher; rank 0 writes its losses and plain PyTorch's to FILE.

LAUNCHER python tests/launched/train.py FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from small import workload

from assigner import Pipeline, load_plan

STEPS = 5


def plain() -> list[float]:
    made = workload()
    torch.manual_seed(made.seed)
    model = made.model()
    optimizer = made.make_optimizer(model.named_parameters())
    losses = []
    for n in range(STEPS):
        inputs, targets = made.make_batch(made.batch_size, n)
        optimizer.zero_grad()
        loss = made.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(file: Path) -> None:
    torch.set_num_threads(1)
    made = workload()
    with Pipeline(made, load_plan(), timeout_s=120.0) as pipeline:
        losses = [pipeline.step(made.make_batch(made.batch_size, n)) for n in range(STEPS)]
        rank = pipeline.rank
    if rank == 0:
        file.write_text(json.dumps({"losses": losses, "plain": plain()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
