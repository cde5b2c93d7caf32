"""A workload that is measured in seconds."""

import torch
from torch import nn

from assigner import Workload


def workload() -> Workload:
    """Four layers in double precision: sums of micro-batches then agree with those of the whole batch."""

    def model() -> nn.Module:
        layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)]
        return nn.Sequential(*layers).double()

    def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
        return x, x.sum(1, keepdim=True)

    return Workload(model, batch, nn.functional.mse_loss, lambda named: torch.optim.SGD(named, lr=0.01), 8)
