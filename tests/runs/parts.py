"""Ranks that hand in the parts of batches that they need, and others as it comes, on three ranks.

    torchrun --nproc-per-node 3 tests/runs/parts.py FOLDER

Writes FOLDER/RANK.json: case -> the largest difference to the plain model, and what this rank needed of it.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn

from assigner import Pipeline

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import WIDTH, Reference, graph_of, make_plan, numbers, skips, workload

if TYPE_CHECKING:
    from assigner import Workload

ROWS = (8, 5)


class Switched(nn.Module):
    """Reads ids where it begins, a mask where it ends, and takes another path for another flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, flag: bool = True) -> torch.Tensor:
        made = self.first(ids)
        return self.last((self.other(made) if flag else torch.tanh(self.other(made))) * mask)


def switched(rows: int, generator: torch.Generator) -> Any:
    """Inputs by keyword, a plain value among them."""
    ids = torch.randint(11, (rows, 4), generator=generator)
    mask = torch.rand(rows, 4, 1, generator=generator, dtype=torch.float64)
    return {"ids": ids, "mask": mask, "flag": rows != 5}, mask.sum(2, keepdim=True)


def counted(rows: int, generator: torch.Generator) -> Any:
    """Targets of which some do not count."""
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (rows,), generator=generator)
    targets[1::2] = -100
    return x, targets


def chain(batch: Any, loss: Any, wide: int, **settings: Any) -> Workload:
    """Three layers."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, wide))

    return replace(workload(model, batch=batch, loss=loss), **settings)


def own(rows: int, generator: torch.Generator) -> Any:
    """The model makes its loss of the inputs."""
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), None


def cases() -> dict[str, tuple[Workload, list[tuple[int, list[str]]]]]:
    """Case -> the workload, and who holds what."""
    in_turn = [(0, ["0"]), (1, ["1"]), (2, ["2"])]
    ignoring = chain(counted, F.cross_entropy, 3, weight=lambda _, targets: (targets != -100).sum())
    by_rows = chain(numbers, F.mse_loss, 1, weight=lambda inputs, _: float(len(inputs)) + 0 * inputs.sum())
    return {
        "keywords": (workload(Switched, "*", batch=switched), [(0, ["first"]), (1, ["other"]), (2, ["last"])]),
        "weights of targets": (ignoring, in_turn),
        "weights of inputs": (by_rows, in_turn),
        "no targets": (chain(own, lambda output, _: output.square().mean(), 1), in_turn),
        "one idles": (skips(), [(1, ["parts.0", "parts.1"]), (2, ["parts.2", "last"])]),
    }


def train(made: Workload, stages: list[tuple[int, list[str]]], name: str, *, moves: bool) -> dict[str, Any]:
    """Steps, evaluations and outputs, and then under another plan; a rank leaves out what it does not need."""
    rank, reference, worst = dist.get_rank(), Reference(made), 0.0
    drawn = random.Random(f"{name} {rank}")
    with Pipeline(made, make_plan(made, stages, micro_batches=2), remat="always", graph=graph_of(made)) as pipeline:
        needs = [[pipeline.needs_inputs, pipeline.needs_targets]]

        def given(batch: Any) -> Any:
            inputs = batch[0] if pipeline.needs_inputs or drawn.random() < 0.5 else None
            targets = batch[1] if pipeline.needs_targets or drawn.random() < 0.5 else None
            return None if inputs is None and targets is None and drawn.random() < 0.5 else (inputs, targets)

        for round_ in range(1 + moves):
            for n, rows in enumerate(ROWS):
                batch = made.make_batch(rows, 10 * round_ + n)
                worst = max(worst, abs(pipeline.evaluate(given(batch)) - reference.loss(batch).item()))
                worst = max(worst, abs(pipeline.step(given(batch)) - reference.step(batch)))
            output = pipeline.forward((given(batch) or (None, None))[0], to=1)
            if output is not None:
                worst = max(worst, float((output - reference.output(batch[0])).abs().max()))
            if moves and not round_:
                turned = [((holder + 1) % 3, held) for holder, held in stages]
                pipeline.move(make_plan(made, turned, micro_batches=2))
                needs.append([pipeline.needs_inputs, pipeline.needs_targets])
        return {"worst": max(worst, reference.distance(pipeline.named_parameters())), "needs": needs}


def main() -> None:
    """Run all cases."""
    dist.init_process_group("gloo")
    found = {name: train(*case, name, moves=name == "one idles") for name, case in cases().items()}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
