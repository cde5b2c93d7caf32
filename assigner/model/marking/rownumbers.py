"""Where numbers of rows go: `arange(len(x))` begins anew in each micro-batch.

arange(rows), eye(rows), mask.nonzero(), ones(rows).cumsum(0)       where they come from
x[arange(rows), lengths], zeros(rows, n).index_add(0, owner, x)     an index into rows: none are left
arange(rows * steps) % steps                                        likewise: where in its row each entry lies
table[arange(rows)], stack((arange(rows), boxes), 1)                there they are
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
    if not numbered or _compares_rows(step, dims) or _begins_anew(step):
        return False, None
    kept = [order.column for _, order in step.given if order.numbers] if step.name in _COPYING else []
    return True, kept[0] if kept else None


_COPYING = frozenset(("_to_copy", "to", "clone", "contiguous", "detach", "alias", "slice"))


def _found(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Of where a mask is set: its rows are told by one column, or by one of several results."""
    if len(step.given) > 1:  # where(mask, a, b)
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
    base, dims = step.given[0][0], step.sizes.dimensions(step.given[0][0].shape)
    if step.name in _PICKING:
        listed = step.argument("indices")
        if isinstance(listed, list | tuple):
            yield from (each for dim, each in enumerate(listed) if dim in dims or each is None)
        elif step.argument("dim") is not None and step.argument("dim") % max(base.dim(), 1) in dims:
            yield step.argument("index")
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
}
