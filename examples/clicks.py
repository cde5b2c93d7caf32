"""Does a visitor click? A large embedding of items, its mean over a history, and a deep MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import assigner

POPULARITY = 8  # half of all visits go to the first 1/256 of the items


class History(nn.Module):
    """Items (rows, length) -> (rows, width): most of the model's memory, and next to none of its work."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.item = nn.Embedding(items, width)

    def forward(self, items: Tensor) -> Tensor:
        """The mean of the items' embeddings."""
        return self.item(items).mean(dim=1)


class Layer(nn.Module):
    """A residual layer: (rows, width) -> (rows, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer makes of it."""
        return x + self.layers(x)


class ClickModel(nn.Module):
    """Items (rows, length) -> scores of no and yes (rows, 2)."""

    def __init__(self, *, items: int, width: int, layers: int) -> None:
        super().__init__()
        self.history = History(items, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 2)

    def forward(self, items: Tensor) -> Tensor:
        """History, layers, head."""
        return self.head(self.layers(self.history(items)))


def taste(items: Tensor) -> Tensor:
    """The hidden rule: a number of each item, made from its id alone."""
    return torch.sin(1.3 * items)


def workload(
    *,
    items: int = 50_000,
    width: int = 128,
    layers: int = 12,
    length: int = 8,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    double: bool = False,
) -> assigner.Workload:
    """The model with its data, loss and optimizer.

    Args:
        items: How many there are; the embedding has a row for each.
        width: Of the embedding and of the layers.
        layers: How many; with the history and the head the model has `layers + 2` partitions.
        length: Items in a history.
        batch_size: Histories in a step.
        learning_rate: Of AdamW.
        double: In float64.
    """
    dtype = torch.float64 if double else torch.float32

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        popular = torch.rand(rows, length, generator=generator) ** POPULARITY
        history = (items * popular).long()
        return history, (taste(history).mean(dim=1) > 0).long()

    return assigner.Workload(
        model=lambda: ClickModel(items=items, width=width, layers=layers).to(dtype),
        batch=batch,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        batch_size=batch_size,
        name="clicks",
        marks=("history", "layers.*", "head"),
    )
