"""Which leaves of a batch carry its rows: those whose first dimension follows the rows that were asked for.

A size alone does not tell: of a batch of 8 rows, a table of 8 entries looks like rows. So two batches are compared:

    rows asked for    ids        table     lengths    what carries rows
    4                 (4, 16)    (8,)      (4,)
    8                 (8, 16)    (8,)      (8,)       ids, lengths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.workload import Batch, Workload

EXAMPLE_ROWS = 4  # not 1, which torch.export would take for a fixed size


@dataclass(frozen=True)
class RowLeaves:
    """Which leaves of a tree carry rows.

    Args:
        structure: The tree's.
        carry: For each leaf; None: the examples had no tensor with dimensions there.
    """

    structure: pytree.TreeSpec
    carry: tuple[bool | None, ...]


def may_carry(known: RowLeaves | None, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> list[bool]:
    """For each leaf of a tree: it may carry rows. In a tree of another structure than the known one any tensor may."""
    carry = known.carry if known is not None and structure == known.structure else (None,) * len(leaves)
    return [
        isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and carries is not False
        for leaf, carries in zip(leaves, carry, strict=True)
    ]


@dataclass(frozen=True)
class BatchRows:
    """Which leaves of a batch carry rows: of the model's (args, kwargs), and of the targets; None: not known."""

    inputs: RowLeaves | None = None
    targets: RowLeaves | None = None


def batch_rows(workload: Workload, example: Batch | None = None) -> BatchRows:
    """What the workload's own batches of two row counts say. Nothing where it makes none, or their sizes are one.

    Args:
        workload: Makes the batches.
        example: One of `EXAMPLE_ROWS` rows, where there is one already.
    """
    try:
        small = workload.make_batch(EXAMPLE_ROWS, workload.seed) if example is None else example
        large = workload.make_batch(2 * EXAMPLE_ROWS, workload.seed)
    except UsageError:  # a script that brings its own batches needs no maker for every number of rows
        return BatchRows()
    pairs = _first_sizes(call_arguments(small[0]), call_arguments(large[0]))
    rows = next((pair for pair in pairs if pair is not None and pair[0] != pair[1]), None)
    if rows is None:
        return BatchRows()
    trees = [(call_arguments(small[0]), call_arguments(large[0])), (small[1], large[1])]
    inputs, targets = [
        RowLeaves(
            pytree.tree_structure(one), tuple(None if pair is None else pair == rows for pair in _first_sizes(one, two))
        )
        for one, two in trees
    ]
    return BatchRows(inputs, targets)


def _first_sizes(one: Any, two: Any) -> list[tuple[int, int] | None]:
    """The first dimensions of two trees' leaves; None where they have none, or the trees differ."""
    (mine, structure), (others, other) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    if structure != other:
        return [None] * len(mine)
    return [
        (a.size(0), b.size(0))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() and b.dim()
        else None
        for a, b in zip(mine, others, strict=True)
    ]
