"""Losses that mix the rows of a batch, or read few, on a pipeline beside plain PyTorch, for any placement.

tests/assigner/test_step_loss.py runs the cases in one process, tests/runs/rows.py and results.py on several ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept
from torch import nn
from workloads import WIDTH, Reference, captured, graph_of, make_plan, numbers, pairs, recurrent, sgd, skips

from assigner import Pipeline
from assigner.model.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence


class Encoder(nn.Module):
    """Two views of each row, embedded by one body and one head: a tuple, or a dict with a number and a table."""

    def __init__(self, *, extras: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extras = extras

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        seen = self.body(torch.cat([left, right], 1).view(left.shape[0], 2, WIDTH)).tanh()
        one, other = self.head(seen).unbind(1)
        if self.extras:
            return {"one": one, "other": other, "unused": one * 2, "twice": 2 * left.shape[1], "none": None}
        return one, other


def contrastive(outputs: Any, targets: Any) -> torch.Tensor:
    """In-batch negatives: every other row is a wrong answer."""
    one, other = (outputs["one"], outputs["other"]) if isinstance(outputs, dict) else outputs
    logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).mT / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits))) + (one.sum(1, keepdim=True) - targets).square().mean()


def spread_out(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A covariance over the rows, changed in place on its way."""
    outputs.sub_(outputs.mean(0, keepdim=True))
    return (outputs.mT @ outputs / len(outputs)).square().sum() + F.mse_loss(outputs.sum(1, keepdim=True), targets)


@kept
def mixing(name: str) -> Workload:
    """A workload with two partitions whose loss is over the batch."""
    models = {
        "tuple": (Encoder, pairs, contrastive),
        "dict": (lambda: Encoder(extras=True), pairs, contrastive),
        "covariance": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)), numbers, spread_out),
    }
    model, batch, loss = models[name]
    return Workload(lambda: model().double(), batch, loss, sgd, 8, marks=("*",), seed=5, name=name, loss_over="batch")


NAMES = ("tuple", "dict", "covariance")


def capture_all() -> None:
    """The graphs that several ranks need."""
    for made in (*map(mixing, NAMES), recurrent()):
        captured(made)


def differences(name: str, ranks: Sequence[int], *, micro_batches: int, **options: Any) -> dict[str, float]:
    """To plain PyTorch: losses in training and without, gradients and weights, over full and ragged batches."""
    made = mixing(name)
    reference = Reference(made)
    first, second = ("0", "1") if name == "covariance" else ("body", "head")
    plan = make_plan(made, [(ranks[0], [first]), (ranks[1], [second])], micro_batches=micro_batches)
    found = {"evaluate": 0.0, "step": 0.0, "gradients": 0.0}
    with Pipeline(made, plan, graph=graph_of(made), **options) as pipeline:
        for n, rows in enumerate((8, 8, 5, 3, 7, 2)):
            batch = made.make_batch(rows, n)
            found["evaluate"] = max(found["evaluate"], abs(pipeline.evaluate(batch) - reference.loss(batch).item()))
            found["step"] = max(found["step"], abs(pipeline.step(batch) - reference.step(batch)))
            found["gradients"] = max(found["gradients"], reference.gradient_distance(pipeline.gradients()))
        found["weights"] = reference.distance(pipeline.named_parameters())
    return found


def rare(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A sum over the rows with a label, and a number for each row: without a label it is a constant."""
    labelled = targets > 0
    if not labelled.any():
        return outputs.new_full((), 0.5 * len(outputs))
    return (outputs - targets)[labelled].square().sum() + 0.5 * len(outputs)


def rare_differences(stages: Sequence[Any], schedule: str, **options: Any) -> dict[str, float]:
    """To plain PyTorch, where some micro-batches have no label."""
    made = replace(skips(), loss=rare, reduction="sum", metrics={"far": lambda made, _: made.abs().sum()})
    found, reference = {"losses": 0.0, "metrics": 0.0, "gradients": 0.0}, Reference(made)
    plan = make_plan(made, stages, schedule=schedule, in_flight=2 if schedule == "1f1b" else None)
    with Pipeline(made, plan, graph=graph_of(made), **options) as pipeline:
        for n, rows in enumerate(([7], [0], [2, 3, 4], range(8), [5])):
            x, targets = batch = made.make_batch(8, n)
            targets.fill_(-1)[list(rows)] = 1
            far = reference.output(x).abs().sum().item()
            result = pipeline.step(batch)
            found["losses"] = max(found["losses"], abs(result - reference.step(batch)))
            found["metrics"] = max(found["metrics"], abs(result.metrics["far"] - far))
            found["gradients"] = max(found["gradients"], reference.gradient_distance(pipeline.gradients()))
    return found
