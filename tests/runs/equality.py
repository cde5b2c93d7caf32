"""On each rank of a plan: how far a pipelined training lies from the same model trained in one piece.

    torchrun --nproc-per-node 2 tests/runs/equality.py ENTRY PLAN FOLDER [--steps 10] [--reference-rows N]

Writes FOLDER/RANK.json: the largest absolute differences over all steps, of the loss, and of this rank's gradients,
weights and buffers after each step. A rank without a stage compares the loss alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import assigner
from assigner.model.workload import Workload, load_workload

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from example_plans import cut


def rows_of(tree: object, start: int, stop: int) -> object:
    """Some rows of a tensor, or of each tensor of a dict or tuple."""
    if isinstance(tree, dict):
        return {key: rows_of(value, start, stop) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(rows_of(value, start, stop) for value in tree)
    assert isinstance(tree, torch.Tensor)
    return tree[start:stop]


def call(model: torch.nn.Module, inputs: object) -> object:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


class Reference:
    """The model in one piece, with plain PyTorch: pieces of the batch add up their weighted losses' gradients."""

    def __init__(self, workload: Workload, rows: int, piece: int) -> None:
        torch.manual_seed(workload.seed)
        self.model = workload.model()
        self.workload, self.rows, self.piece = workload, rows, piece
        self.optimizer = workload.optimizer(self.model.parameters())
        self.parameters = dict(self.model.named_parameters())
        self.buffers = {name: each for name, each in self.model.state_dict().items() if name not in self.parameters}

    def step(self, inputs: object, targets: object) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for start in range(0, self.rows, self.piece):
            stop = min(start + self.piece, self.rows)
            outputs = call(self.model, rows_of(inputs, start, stop))
            loss = self.workload.loss(outputs, rows_of(targets, start, stop))
            weighted = loss * ((stop - start) / self.rows if self.workload.reduction == "mean" else 1.0)
            weighted.backward()
            total += weighted.item()
        self.optimizer.step()
        return total


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def compare(pipeline: assigner.Pipeline, reference: Reference, steps: int) -> dict[str, float]:
    worst = {"loss": 0.0, "gradients": 0.0, "weights": 0.0, "buffers": 0.0}

    def note(what: str, value: float) -> None:
        worst[what] = max(worst[what], value) if value == value else float("inf")  # noqa: PLR0124 - NaN

    for step in range(steps):
        batch = reference.workload.make_batch(reference.rows, 100 + step)
        note("loss", abs(pipeline.step(batch) - reference.step(*batch)))
        gradients = pipeline.gradients()
        for name, parameter in pipeline.named_parameters():
            theirs = reference.parameters[name]
            assert (theirs.grad is None) == (name not in gradients), name
            if theirs.grad is not None:
                note("gradients", difference(gradients[name], theirs.grad))
            note("weights", difference(parameter.detach(), theirs.detach()))
        for name, tensor in pipeline.state_dict().items():
            if name in reference.buffers:
                note("buffers", difference(tensor, reference.buffers[name]))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("entry")
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reference-rows", type=int, help="rows that the reference takes at once; default: all")
    options = parser.parse_args()
    workload = load_workload(options.entry)
    batch_norm = "micro_batch" if options.reference_rows else "deferred"
    with assigner.Pipeline(workload, options.plan, batch_norm=batch_norm, graph=cut(options.entry)) as pipeline:
        rows = pipeline.plan.workload.batch_size
        reference = Reference(workload, rows, options.reference_rows or rows)
        worst = compare(pipeline, reference, options.steps)
        held = [name for name, _ in pipeline.named_parameters()]
        buffers = [name for name in pipeline.state_dict() if name in reference.buffers]
        result = {"worst": worst, "parameters": held, "buffers": buffers, "all": list(reference.parameters)}
        (options.folder / f"{pipeline.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
