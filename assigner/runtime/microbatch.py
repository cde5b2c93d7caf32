"""Cutting a batch into micro-batches, along the first dimension of every tensor in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.usercode import user_code
from assigner.workload import Batch, call_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Args:
        inputs: The flattened arguments of the model's forward; tensors have this micro-batch's rows.
        targets: The targets, in their own structure.
        weight: What its loss counts for in the step's loss; 0: it is not even computed.
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


def split_batch(
    batch: Batch, size: int, *, reduction: str, weight: Callable[[Any, Any], float | torch.Tensor] | None = None
) -> list[MicroBatch]:
    """A batch as micro-batches of `size` rows; the last one has what is left.

    Args:
        batch: (inputs, targets). Tensors whose first dimension is the batch's rows are cut, the rest goes whole to
            every micro-batch.
        size: Rows in a micro-batch.
        reduction: "mean": a micro-batch's loss counts by its share of the rows; "sum": in full.
        weight: `weight(inputs, targets)` of a micro-batch: under "mean" its share of these counts, not that of rows.

    Raises:
        UsageError: a weight that is negative or not finite, or all of them are 0.
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

    parts = list(zip(cut(batch[0]), cut(batch[1]), strict=True))
    if reduction == "sum":
        shares = [1.0] * count
    elif weight is None:
        shares = [min(size, rows - start) / rows for start in range(0, rows, size)]
    else:
        shares = _shares([_weigh(weight, inputs, targets) for inputs, targets in parts])
    return [
        MicroBatch(pytree.tree_leaves(call_arguments(inputs)), targets, share)
        for (inputs, targets), share in zip(parts, shares, strict=True)
    ]


def _weigh(weight: Callable[[Any, Any], float | torch.Tensor], inputs: Any, targets: Any) -> float:
    with user_code("Workload.weight"):
        found = float(weight(inputs, targets))
    if not (math.isfinite(found) and found >= 0):
        raise UsageError(f"Workload.weight gave {found} for a micro-batch", hint="return a number that is not negative")
    return found


def _shares(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    if not total:
        raise UsageError(
            "Workload.weight gave 0 for every micro-batch: the batch's loss would be 0 / 0",
            hint="leave out batches in which no target counts",
        )
    return [each / total for each in weights]
