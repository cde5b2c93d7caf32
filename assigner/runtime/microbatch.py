"""Cutting a batch into micro-batches, along the first dimension of every tensor in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.workload import Batch, call_arguments


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Args:
        inputs: The flattened arguments of the model's forward; tensors have this micro-batch's rows.
        targets: The targets, in their own structure.
        weight: What its loss counts for in the step's loss.
    """

    inputs: list[Any]
    targets: Any
    weight: float


def row_count(batch: Batch) -> int:
    """Rows of a batch: the first dimension of its first input tensor.

    Raises:
        UsageError: there is none.
    """
    for leaf in pytree.tree_leaves(call_arguments(batch[0])):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0):
            return leaf.size(0)
    raise UsageError("the batch's inputs hold no tensor with rows", hint="the first dimension of inputs is the rows")


def split_batch(batch: Batch, size: int, *, reduction: str) -> list[MicroBatch]:
    """A batch as micro-batches of `size` rows; the last one has what is left.

    Args:
        batch: (inputs, targets). Tensors whose first dimension is the batch's rows are cut, the rest goes whole to
            every micro-batch.
        size: Rows in a micro-batch.
        reduction: "mean": a micro-batch's loss counts by its share of the rows; "sum": in full.
    """
    rows = row_count(batch)
    count = -(-rows // size)

    def cut(tree: Any) -> list[Any]:
        leaves, spec = pytree.tree_flatten(tree)
        parts = [
            leaf.split(size)  # type: ignore[no-untyped-call]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == rows
            else (leaf,) * count
            for leaf in leaves
        ]
        return [pytree.tree_unflatten([part[n] for part in parts], spec) for n in range(count)]

    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    return [
        MicroBatch(pytree.tree_leaves(call_arguments(inputs)), targets, mine / rows if reduction == "mean" else 1.0)
        for inputs, targets, mine in zip(cut(batch[0]), cut(batch[1]), sizes, strict=True)
    ]
