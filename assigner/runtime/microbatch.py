"""Cutting a batch into micro-batches, along the first dimension of every tensor in it that carries rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.marking.domain import input_structure
from assigner.marking.rows import BatchRows, RowLeaves, batch_rows, may_carry
from assigner.runtime.sameness import described
from assigner.usercode import user_code
from assigner.workload import Batch, Workload, call_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils._pytree import TreeSpec


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Args:
        inputs: The flattened arguments of the model's forward; tensors have this micro-batch's rows.
        targets: The targets, in their own structure.
        weight: What its loss counts for in the step's loss; 0: it is not even computed.
        rows: How many it has.
    """

    inputs: list[Any]
    targets: Any
    weight: float
    rows: int


def check_pair(batch: Any) -> None:
    """A batch to train on or to evaluate is (inputs, targets); a DataLoader makes a list of them.

    Raises:
        UsageError: it is anything else.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        given = described(batch) if isinstance(batch, torch.Tensor) else f"a {type(batch).__name__}{size}"
        raise UsageError(
            f"a batch is a pair (inputs, targets), and {given} was given",
            hint="pass (inputs, targets), as Workload.batch makes them",
        )


class Cutting:
    """How the batches of a workload are cut.

    Which tensors carry rows is learnt from two batches of the workload's own, once, at the first use. Where the
    workload makes none for 4 and for 8 rows, and in a batch of another structure than those, every tensor does that
    has as many rows as the first one.

    Args:
        workload: Its batch maker, what its loss does over the rows, and what its micro-batches count for.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @cached_property
    def _known(self) -> BatchRows:
        return batch_rows(self._workload)

    def row_count(self, inputs: Any) -> int:
        """Rows of a batch: the first dimension of its first input tensor that carries them.

        Raises:
            UsageError: there is none.
        """
        leaves, structure = pytree.tree_flatten(call_arguments(inputs))
        for leaf, may in zip(leaves, may_carry(self._known.inputs, structure, leaves), strict=True):
            if may and leaf.size(0):
                return int(leaf.size(0))
        raise UsageError(
            "the batch's inputs hold no tensor with rows", hint="the first dimension of inputs is the rows"
        )

    def split(self, batch: Batch, size: int, *, weighed: bool = True) -> list[MicroBatch]:
        """A batch as micro-batches of `size` rows; the last one has what is left.

        Args:
            batch: (inputs, targets). Tensors that carry the batch's rows are cut, the rest goes whole to every
                micro-batch.
            size: Rows in a micro-batch.
            weighed: False: micro-batches count by their rows, whatever the workload's `weight` says.

        Raises:
            UsageError: a weight that is negative or not finite, or all of them are 0; inputs and targets differ in
                their rows.
        """
        rows = self.row_count(batch[0])
        self._check_targets(batch[1], rows)
        sizes = [min(size, rows - start) for start in range(0, rows, size)]
        inputs = _cut(batch[0], self._known.inputs, input_structure(batch[0]), rows, size)
        targets = _cut(batch[1], self._known.targets, pytree.tree_structure(batch[1]), rows, size)
        if self._workload.reduction == "sum":
            shares = [1.0] * len(sizes)
        elif self._workload.weight is None or not weighed:
            shares = [each / rows for each in sizes]
        else:
            shares = _shares([_weigh(self._workload.weight, *pair) for pair in zip(inputs, targets, strict=True)])
        return [
            MicroBatch(pytree.tree_leaves(call_arguments(mine)), wanted, share, each)
            for mine, wanted, share, each in zip(inputs, targets, shares, sizes, strict=True)
        ]

    def _check_targets(self, targets: Any, rows: int) -> None:
        leaves, structure = pytree.tree_flatten(targets)
        known = self._known.targets
        if known is None or known.structure != structure:
            return
        for leaf, carries in zip(leaves, known.carry, strict=True):
            if carries and isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) != rows:
                raise UsageError(
                    f"the batch has {rows} rows of inputs, and {leaf.size(0)} of targets ({described(leaf)})",
                    hint="give each row of the inputs its target",
                )


def _cut(tree: Any, known: RowLeaves | None, structure: TreeSpec, rows: int, size: int) -> list[Any]:
    """A tree of each micro-batch; `structure` is what `known` speaks of."""
    leaves, spec = pytree.tree_flatten(tree)
    count = -(-rows // size)
    parts = [
        leaf.split(size) if may and leaf.size(0) == rows else (leaf,) * count
        for leaf, may in zip(leaves, may_carry(known, structure, leaves), strict=True)
    ]
    return [pytree.tree_unflatten([part[n] for part in parts], spec) for n in range(count)]


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
