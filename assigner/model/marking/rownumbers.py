"""Where numbers of rows go: `arange(len(x))` begins anew in each micro-batch.

arange(rows), eye(rows), mask.nonzero(), ones(rows).cumsum(0)       where they come from
x[arange(rows), lengths], zeros(rows, n).index_add(0, owner, x)     an index into rows: none are left
arange(rows * steps) % steps                                        likewise: where in its row each entry lies
table[arange(rows)], stack((arange(rows), boxes), 1)                there they are

Arithmetic, comparing and what changes shapes hand them on; what computes with them otherwise, as a product of matrices
or a bag whose ends they say, makes something of the rows they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.model.marking.roworder import CREATING, SCATTERING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.model.marking.roworder import RowStep

_COUNTING = frozenset((
    "arange", "range", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "randperm", "combinations",
))  # fmt: skip
_REMAINDERS = frozenset(("remainder", "fmod", "remainder_", "fmod_"))
_PICKING = frozenset(("index", "_unsafe_index", "index_select", "gather", "embedding", "take_along_dim")) | SCATTERING
_LOSSES = frozenset(("nll_loss_forward", "nll_loss", "nll_loss_nd", "nll_loss2d_forward", "cross_entropy_loss"))
_COPYING = frozenset(("_to_copy", "to", "clone", "contiguous", "detach", "alias"))
_JOINING = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"))
_ENDING = frozenset((
    "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", "bincount", "take", "searchsorted", "bucketize",
    "mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "dot", "einsum", "linear",
))  # fmt: skip
"""They make something of the rows that numbers mean."""


def numbers_of(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Whether a result of an operation has numbers of rows, and in which column alone; None: it may be any."""
    dims = step.sizes.dimensions(step.made[index].shape)
    if not dims or step.name in CREATING:
        return False, None
    if step.name in _COUNTING or (step.name == "repeat_interleave" and len(step.args) == len(step.given) == 1):
        return True, None  # the latter says which one each is of
    rule = _RULES.get(step.name, _left)
    return rule(step, index)


def _summed(step: RowStep, index: int) -> tuple[bool, int | None]:
    dims = step.sizes.dimensions(step.made[index].shape)
    dim, (given, order) = step.argument("dim", 0), step.given[0]
    return order.numbers or (order.alike and dim % max(given.dim(), 1) in dims), None


def _left(step: RowStep, index: int) -> tuple[bool, int | None]:
    """What has numbers of rows gives them on, but for an index."""
    dims, only = step.sizes.dimensions(step.made[index].shape), [*_indexing(step)]
    numbered = any(order.numbers for each, order in step.given if not any(each is other for other in only))
    if not numbered or step.name in _ENDING or "attention" in step.name:
        return False, None
    if _compares_rows(step, dims) or _begins_anew(step):
        return False, None
    kept = [order.column for _, order in step.given if order.numbers] if step.name in _COPYING else []
    return True, kept[0] if kept else None


def _joined(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Of what lies side by side in the last dimension, one has them in a column of its own."""
    numbered, column = _left(step, index)
    made, at, found = step.made[index], 0, list[int]()
    dim = step.argument("dim", 0) % made.dim()
    for each, order in step.given if numbered and dim == made.dim() - 1 and step.name != "vstack" else ():
        width = 1 if step.name == "stack" else each.shape[-1]
        if not isinstance(width, int):
            return numbered, None
        if order.numbers:
            found.append(at if width == 1 else -1)
        at += width
    return numbered, found[0] if len(found) == 1 and found[0] >= 0 else column


def _sliced(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Columns beside that of the numbers have none."""
    given, order = step.given[0]
    if order.column is None or step.argument("dim", 0) % given.dim() != given.dim() - 1:
        return order.numbers, order.column
    start, width = step.argument("start") or 0, step.made[index].shape[-1]
    if not (isinstance(start, int) and isinstance(width, int)) or step.argument("step", 1) != 1:
        return order.numbers, None
    at = order.column - start % int(given.shape[-1])
    return (True, at) if 0 <= at < width else (False, None)


def _found(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Of where a mask is set: its rows are told by one column, or by one of several results."""
    if len(step.given) > 1 or (len(step.args) > 1 and step.name == "where"):  # where(mask, a, b)
        return _left(step, index)
    given = step.given[0][0]
    dims = step.sizes.dimensions(given.shape)
    if len(dims) != 1:
        return bool(dims), None
    return (index == dims[0], None) if len(step.made) > 1 else (True, dims[0])


def _column(step: RowStep, index: int) -> tuple[bool, int | None]:
    given, order = step.given[0]
    if order.column is None or step.argument("dim", 0) % given.dim() != given.dim() - 1:
        return order.numbers, order.column
    which = index if step.name == "unbind" else step.argument("index")
    return not isinstance(which, int) or which % int(given.shape[-1]) == order.column, None


def _indexing(step: RowStep) -> Iterator[Any]:
    """The arguments that only say which rows of another one are meant."""
    if not step.given:
        return
    dims = step.sizes.dimensions(step.given[0][0].shape)
    if step.name in _PICKING:
        listed = step.argument("indices")
        if dims:
            yield from listed if isinstance(listed, list | tuple) else (step.argument("index"), listed)
    elif step.name in _LOSSES and len(dims) > 1:
        yield step.argument("target")


def _compares_rows(step: RowStep, dims: list[int]) -> bool:
    """Among what is of pairs of rows, numbers say which are of the same row: it mixes rows without them, too."""
    return len(dims) > 1 and any(
        len(step.sizes.dimensions(each.shape)) > 1 and not order.numbers and not order.alike
        for each, order in step.given
    )


def _begins_anew(step: RowStep) -> bool:
    """What remains after a division by what one row has is where in its row an entry lies."""
    if step.name not in _REMAINDERS:
        return False
    divisors = [each for each in pytree.tree_leaves(step.args) if isinstance(each, int | torch.SymInt)]
    blocks = step.given[0][1].blocks
    return len(divisors) == 1 and len(blocks) == 1 and blocks[0] % step.sizes.number(divisors[0]) == 0


_RULES = {
    **dict.fromkeys(("nonzero", "nonzero_static", "argwhere", "nonzero_numpy", "where"), _found),
    **dict.fromkeys(("cumsum", "cumprod", "cumsum_", "cumprod_"), _summed),
    **dict.fromkeys(("select", "unbind"), _column),
    **dict.fromkeys(_JOINING, _joined),
    **dict.fromkeys(("slice", "narrow"), _sliced),
}
