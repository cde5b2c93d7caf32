"""Models whose weights are shared in every way: frozen, unused, and with sparse gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kept import kept
from torch import nn
from workloads import TOKENS, WIDTH, next_token, tokens, workload

if TYPE_CHECKING:
    from assigner.model.workload import Workload


class Shared(nn.Module):
    """Four linear layers; between the outer ones a frozen weight is shared, a trained one, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)
        for part in self.parts:
            part.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
            part.idle = nn.Parameter(torch.randn(WIDTH))
        for part in self.parts[1:]:
            part.frozen, part.idle, part.bias = self.parts[0].frozen, self.parts[0].idle, self.parts[0].bias
        self.parts[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x) * part.frozen) + part.idle.detach()
        return self.last(x)


@kept
def shared() -> Workload:
    """`Shared` with weight decay, which would change a weight that got zeros for a gradient."""
    return workload(
        Shared, "parts.*", "last", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5)
    )  # fmt: skip


class Lookups(nn.Module):
    """Embeddings with sparse gradients: one alone, one whose weight another one has too, one that shares a head's."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(TOKENS, WIDTH, sparse=True) for _ in range(4))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.tables[2].weight = self.tables[1].weight
        self.head.weight = self.tables[3].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.parts[0](self.tables[0](ids) + self.tables[1](ids) + self.tables[3](ids)))
        return self.head(self.parts[1](x) + self.tables[2](ids))


@kept
def lookups() -> Workload:
    """`Lookups`, whose optimizer takes sparse gradients and dense ones."""
    return workload(
        Lookups, "tables.*", "parts.*", "head", batch=tokens, loss=next_token,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3),
    )  # fmt: skip
