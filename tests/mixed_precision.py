"""Small models in float32 that compute under autocast, and the plain model's step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept
from torch import nn
from workloads import WIDTH, Block

from assigner.model.workload import Workload


class Mixed(nn.Module):
    """Blocks with an einsum between linear layers, glue that multiplies, and a head: all of it is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3, device=x.device).tril()
        for block in self.blocks:
            x, _ = block(x, mask=mask, length=3)
        x = x @ self.turn
        return self.head(x).mean(1)


@kept
def make_workload(model: Any = Mixed, autocast: str | None = "bfloat16") -> Workload:
    """In float32, with inputs of three positions for `Mixed`."""
    shape = (3, WIDTH) if model is Mixed else (WIDTH,)
    return Workload(
        model,
        lambda rows, g: (torch.randn(rows, *shape, generator=g), torch.randn(rows, 1, generator=g)),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        marks=("blocks.*", "head") if model is Mixed else ("parts.*", "last"),
        seed=5,
        autocast=autocast,
    )


def plain_step(made: Workload, model: nn.Module, batch: Any, *, micro_batches: int = 1) -> float:
    """One step of the plain model on equal parts of a batch; its gradients stay."""
    model.zero_grad()
    total = 0.0
    for n in reversed(range(micro_batches)):  # backwards run in this order under GPipe
        inputs, targets = (each.chunk(micro_batches)[n] for each in batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = made.loss(model(inputs), targets) / micro_batches
        loss.backward()
        total += loss.item()
    return total
