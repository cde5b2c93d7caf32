"""What is compared: losses, outputs, gradients, buffers and parameters, each under the partition that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.model.marking import PartitionGraph

Quantity = Literal["initial value", "loss", "output", "gradient", "buffer", "parameter"]


class Item(NamedTuple):
    """One value that both sides have.

    Args:
        quantity: What it is.
        partition: The partition that holds it.
        name: Of the parameter or buffer in the model; of an output its place.
    """

    quantity: Quantity
    partition: str
    name: str = ""

    def __str__(self) -> str:
        if self.quantity == "loss":
            return "the loss"
        if self.quantity == "output":
            return f"the model's output{self.name}"
        return {"gradient": "the gradient of ", "parameter": "", "buffer": "buffer ", "initial value": ""}[
            self.quantity
        ] + self.name


class Side(Protocol):
    """One way to train the model: as it is, or cut into partitions."""

    def train(self, step: int) -> None:
        """Forward and backward of a step's batch."""

    def update(self) -> None:
        """Apply the gradients, and drop them."""

    def evaluate(self) -> None:
        """The loss over the first batch in eval mode."""

    def look(self, item: Item) -> torch.Tensor | None:
        """A value as it is now; None: there is none."""


def held_items(graph: PartitionGraph, quantity: Quantity) -> Iterator[Item]:
    """The parameters of all partitions, or their buffers, or both (the initial values)."""
    for piece in graph.pieces:
        for name in {"buffer": piece.buffers, "initial value": piece.state}.get(quantity, piece.parameters):
            yield Item(quantity, piece.name, name)


@dataclass
class HeardLoss:
    """A workload's loss that keeps what it is given in eval mode: the model's outputs for each micro-batch.

    In training it need not: gradients tell of outputs, and a recompute asks for losses in another order.

    Args:
        loss: The workload's own; None: the model is used for its outputs alone.
        listens: Calls are kept.
        heard: The outputs, by micro-batch.
        dtype: Of the loss.
    """

    loss: Callable[[Any, Any], torch.Tensor] | None
    listens: bool = False
    heard: list[Any] = field(default_factory=list)
    dtype: torch.dtype = torch.float64

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The loss's value; 0 where there is none."""
        if self.listens:
            self.heard.append(pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), outputs))
        value = torch.zeros((), device="cpu") if self.loss is None else self.loss(outputs, targets)
        self.dtype = getattr(value, "dtype", self.dtype)  # what is no tensor is refused by who asked
        return value

    def begin(self, *, listens: bool) -> None:
        """Forget what was heard, and keep what is said from now on or do not."""
        self.heard, self.listens = [], listens

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors and numbers among the outputs, by micro-batch and place."""
        return {
            f"{pytree.keystr(path)} of micro-batch {n}": leaf
            if isinstance(leaf, torch.Tensor)
            else torch.tensor(leaf, device="cpu")
            for n, outputs in enumerate(self.heard)
            for path, leaf in pytree.tree_leaves_with_path(outputs)
            if isinstance(leaf, torch.Tensor | bool | int | float)
        }
