"""Workloads with metrics and several outputs, for tests in one process and on several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from workloads import TOKENS, WIDTH, Language, adam, captured, tokens, workload

if TYPE_CHECKING:
    from assigner.model.workload import Workload


def error(outputs: Any, targets: Any) -> torch.Tensor:
    """A mean over the rows."""
    return (outputs - targets).abs().mean()


def relative(outputs: Any, targets: Any) -> tuple[torch.Tensor, float]:
    """A pair: neither part is a mean."""
    return (outputs - targets).abs().sum(), float(targets.abs().sum())


def near(outputs: Any, targets: Any) -> tuple[int, int]:
    """A pair of whole numbers."""
    return int(((outputs - targets).abs() < 2).sum()), targets.numel()


METRICS = {"error": error, "near": near, "relative": relative}


def whole(outputs: Any, targets: Any) -> dict[str, float]:
    """What METRICS are over a batch, by hand."""
    with torch.no_grad():
        far = (outputs - targets).abs()
        return {
            "error": far.mean().item(),
            "near": (far < 2).double().mean().item(),
            "relative": (far.sum() / targets.abs().sum()).item(),
        }


class Forked(nn.Module):
    """Few rows leave early: their output is made by another partition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.a(x)
        if x.shape[0] > 2:
            return self.b(made.tanh())
        return made


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def layers(**options: Any) -> Workload:
    """Two layers, with METRICS."""
    return replace(workload(two_layers), **{"metrics": METRICS, **options})


def forked() -> Workload:
    """Micro-batches of two graphs, whose outputs two partitions make."""
    return replace(workload(Forked, "*"), metrics=METRICS)


class Lossy(Language):
    """Gets the targets as an input, some of which do not count, and returns (logits, loss) as nanoGPT does."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def _counted(rows: int, generator: torch.Generator) -> Any:
    ids, targets = tokens(rows, generator)
    targets = torch.where(torch.rand(targets.shape, generator=generator) < 0.4, -1, targets % TOKENS)
    targets[:, 0] = ids[:, 0]
    return (ids, targets), targets


def its_own(outputs: Any, _: Any) -> torch.Tensor:
    """The loss that the model gives."""
    loss: torch.Tensor = outputs[1]
    return loss


def lossy(**options: Any) -> Workload:
    """Its loss is the model's own second output; micro-batches count by their tokens."""
    made = workload(Lossy, "tokens", "blocks.*", "head", batch=_counted, loss=its_own, optimizer=adam)
    return replace(made, weight=lambda _, targets: (targets != -1).sum(), **options)


def capture_all() -> None:
    """The graphs that several ranks need."""
    for made in (forked(), lossy()):
        captured(made)
