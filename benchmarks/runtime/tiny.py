"""The smallest model that two workers can share: what a micro-batch costs here is the runtime's own time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import assigner

WIDTH = 16


class Chain(nn.Module):
    """Linear layers, each a partition: (rows, 16) -> the same."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def workload(*, layers: int = 2, batch_size: int = 64) -> assigner.Workload:
    """The model with random data, the mean squared error and SGD.

    Args:
        layers: Partitions.
        batch_size: Rows in a step.
    """

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)

    return assigner.Workload(
        model=lambda: Chain(layers),
        batch=batch,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch_size=batch_size,
        name="tiny",
        marks=("layers.*",),
    )
