"""Losses over the batch, and rows in Python containers, on two ranks.

    torchrun --nproc-per-node 2 tests/runs/rows.py FOLDER

Writes FOLDER/RANK.json: case -> the largest differences that this rank found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from assigner import Pipeline

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from loss_cases import NAMES, differences
from workloads import WIDTH, Reference, graph_of, make_plan, numbers, recurrent, steps_and_rows, workload


def labelled(rows: int, generator: torch.Generator) -> Any:
    """Rows with a list of a dict each."""
    x, y = numbers(rows, generator)
    return x, [{"near": y[n] + torch.arange(1 + n % 3), "name": f"row {n}"} for n in range(rows)]


def near(outputs: torch.Tensor, targets: list[dict[str, Any]]) -> torch.Tensor:
    """Over the rows' own targets; a zip does not notice those of another micro-batch."""
    found = [(output - each["near"]).square().mean() for output, each in zip(outputs, targets, strict=False)]
    return torch.stack(found).mean()


def lists() -> dict[str, float]:
    """Every rank cuts a list as rank 0 does, whatever the rows."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), batch=labelled, loss=near)
    reference, worst = Reference(made), 0.0
    with Pipeline(made, make_plan(made, [(1, ["0"]), (0, ["1"])], micro_batches=3), graph=graph_of(made)) as pipeline:
        for rows in (8, 5, 3, 2):
            batch = made.make_batch(rows, rows)
            worst = max(worst, abs(pipeline.evaluate(batch) - reference.loss(batch).item()))
            worst = max(worst, abs(pipeline.step(batch) - reference.step(batch)))
        return {"losses": worst, "weights": reference.distance(pipeline.named_parameters())}


def by_time() -> dict[str, float]:
    """Rows in the second dimension, and lengths that change, over two workers."""
    made = recurrent()
    reference, worst = Reference(made), 0.0
    plan = make_plan(made, [(1, ["tokens"]), (0, ["memory", "head"])], micro_batches=3, remat=["memory"])
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        for rows, length in ((8, 6), (5, 3), (3, 3), (2, 9), (1, 4), (8, 1)):
            batch = steps_and_rows(rows, torch.Generator().manual_seed(rows), length)
            output = pipeline.forward(batch[0], to=None)
            worst = max(worst, float((output - reference.output(batch[0])).abs().max()))
            worst = max(worst, abs(pipeline.evaluate(batch) - reference.loss(batch).item()))
            worst = max(worst, abs(pipeline.step(batch) - reference.step(batch)))
        return {"losses": worst, "weights": reference.distance(pipeline.named_parameters())}


def main() -> None:
    """Run all cases."""
    dist.init_process_group("gloo")
    found = {"lists": lists(), "by time": by_time()}
    for name in NAMES:
        for remat in ("never", "always"):
            found[f"{name}, remat {remat}"] = differences(name, (1, 0), micro_batches=3, remat=remat)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
