"""In which order an operation leaves the rows of what it is given, and whether their numbers.

A dimension of rows is a number of blocks, in each of which so many entries for each row lie row by row:

    x                                   (1)
    x.repeat_interleave(2, 0), x.unflatten(0, (-1, 2)) as one dimension     (2)     joined as in the model
    cat((a, b)), x.repeat(2, 1), x.expand(2, ...).flatten(0, 1)             (1, 1)  joined: another order
    of these: chunk(2), [:rows], unflatten(0, (2, -1))                      (1)
    of these: [::2], unflatten(0, (-1, 2)), [mask]                          not known

And where numbers of rows go: `arange(len(x))` begins anew in each micro-batch.

    arange(rows), eye(rows), mask.nonzero(), ones(rows).cumsum(0)       where they come from
    x[arange(rows), lengths], zeros(rows, n).index_add(0, owner, x)     an index into rows: none are left
    arange(rows * steps) % steps                                        likewise: where in its row each entry lies
    table[arange(rows)], stack((arange(rows), boxes), 1)                there they are

Arithmetic, comparing and what changes shapes hand them on; what computes with them otherwise, as a product of matrices
or a bag whose ends they say, makes something of the rows they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import is_random, named_arguments
from assigner.model.marking.domain import MANY_ROWS, Symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_BLOCKS = 65_536  # with more, where a size in front is of millions, nobody keeps count

CREATING = frozenset((
    "zeros", "ones", "full", "empty", "empty_strided", "empty_permuted", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like", "empty_like", "zero_", "fill_",
))  # fmt: skip
"""They give the same for any row."""

SCATTERING = frozenset((
    "index_put", "index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce",
    "index_put_", "index_add_", "index_copy_", "index_fill_", "index_reduce_", "scatter_", "scatter_add_",
    "scatter_reduce_", "_unsafe_index_put", "_index_put_impl_",
))  # fmt: skip
"""They write where numbers say, into what they are given first."""


@dataclass(frozen=True)
class RowOrder:
    """How a tensor has the rows of a micro-batch.

    Args:
        blocks: How many entries for each row each block has; empty: no dimension has the rows, or several have them.
        known: False: they lie in an order that is none of blocks.
        alike: All rows have the same there.
        numbers: It has numbers of rows in it, which follow from where a row lies in the micro-batch alone.
        column: Of numbers in several columns, the last dimension, the one that has those of rows; None: any may.
    """

    blocks: tuple[float, ...] = ()
    known: bool = True
    alike: bool = False
    numbers: bool = False
    column: int | None = None

    @property
    def several(self) -> float:
        """How many entries it has for each row."""
        return sum(self.blocks)

    @property
    def lies_row_by_row(self) -> bool:
        """What belongs to one row lies together, in the rows' order."""
        return self.known and len(self.blocks) == 1


@dataclass(frozen=True)
class RowStep:
    """An operation with its arguments, tensors in the places of nodes, and the tensors that it gives.

    Of the tensors among its arguments, in order, `given` says what is known; `sizes` are the capture's.
    """

    target: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    given: Sequence[tuple[torch.Tensor, RowOrder]]
    made: Sequence[torch.Tensor]
    sizes: Symbols

    @cached_property
    def name(self) -> str:
        """Of the operation; empty: it is none of torch's."""
        is_torchs = isinstance(self.target, torch._ops.OpOverload)
        return str(self.target.overloadpacket.__name__) if is_torchs else ""

    def argument(self, name: str, default: Any = None) -> Any:
        """One of the arguments by its name in the schema."""
        if not isinstance(self.target, torch._ops.OpOverload):
            return default
        return named_arguments(self.target, self.args, self.kwargs).get(name, default)


def plain_order(tensor: torch.Tensor, sizes: Symbols) -> RowOrder:
    """That of a tensor of which nothing is known but its shape."""
    found = [each for size in tensor.shape if (each := sizes.several(size)) is not None]
    return RowOrder((found[0],), known=not math.isnan(found[0])) if len(found) == 1 else RowOrder()


def order_of(step: RowStep, index: int) -> RowOrder:
    """How one of the results of an operation has the rows."""
    numbers, column = _numbers_of(step, index)
    return replace(_blocks_of(step, index), numbers=numbers, column=column)


def _blocks_of(step: RowStep, index: int) -> RowOrder:
    """In which order it has them.

    A rule gives the blocks; None: they are not known.
    """
    made = step.made[index]
    plain = plain_order(made, step.sizes)
    if not plain.blocks or not plain.known:
        return plain
    if step.name in CREATING:
        return replace(plain, alike=True)
    blocks = _RULES.get(step.name, _usual)(step, index, plain.several)
    if blocks is None:
        return replace(plain, known=False)
    return RowOrder(blocks, alike=_is_alike(step))


def _is_alike(step: RowStep) -> bool:
    if not step.given or is_random(step.target):
        return False
    if step.name in _EXPANDING:
        order = step.given[0][1]
        return order.alike or not step.sizes.dimensions(step.given[0][0].shape)
    if step.name in _JOINING or step.name in SCATTERING:
        return False
    with_rows = [order for each, order in step.given if step.sizes.dimensions(each.shape)]
    return bool(with_rows) and all(each.alike for each in with_rows)


def _usual(step: RowStep, _: int, several: float) -> tuple[float, ...] | None:
    """Row by row, or entry by entry: the result has the order of what it is made of."""
    rows = [order for _, order in step.given if order.blocks]
    ordered = [each for each in rows if not each.alike]
    if not all(each.known for each in rows):
        return None
    kinds = {each.blocks for each in ordered if each.several == several}
    if any(len(each.blocks) > 1 for each in ordered if each.several != several) or len(kinds) > 1:
        return None
    if kinds:
        return kinds.pop()
    grows = several > max((each.several for each in ordered), default=several)
    return None if grows and isinstance(step.target, torch._ops.OpOverload) else (several,)


def _joined(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    parts = [order for _, order in step.given if order.blocks]
    if not all(each.known for each in parts):
        return None
    if len(parts) < 2 or several != sum(each.several for each in parts):
        return _usual(step, index, several)
    return tuple(block for each in parts for block in each.blocks)


def _shaped(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    """A tensor of another shape: blocks come apart along a new dimension in front, and arise where one goes in."""
    given, order = step.given[0]
    if not order.blocks or not order.known:
        return None if step.sizes.dimensions(given.shape) else (several,)
    (dim,), (made_dim,) = (step.sizes.dimensions(each.shape) for each in (given, step.made[index]))
    shapes = given.shape[:dim], step.made[index].shape[:made_dim]  # a tensor runs through a dimension so many times
    before, after = (math.prod(map(step.sizes.many, each)) for each in shapes)
    if not before or not after or max(before, after) % min(before, after):
        return None
    if after < before and len(order.blocks) * (before // after) > _MOST_BLOCKS:
        return None
    blocks = _apart(order.blocks, after // before) if after > before else order.blocks * (before // after)
    return None if blocks is None else _scaled(blocks, several / sum(blocks))


def _apart(blocks: tuple[float, ...], times: int) -> tuple[float, ...] | None:
    """One of so many equal parts."""
    length = len(blocks) // times
    return blocks[:length] if length and blocks == blocks[:length] * times else None


def _scaled(blocks: tuple[float, ...], factor: float) -> tuple[float, ...] | None:
    """The same with more or fewer entries for each row, where these lie in every block beside each other."""
    whole = [factor] if factor >= 1 else [each * factor for each in blocks] if len(blocks) > 1 else []
    return tuple(each * factor for each in blocks) if all(each.is_integer() for each in whole) else None


def _repeated(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    order = step.given[0][1]
    if not order.blocks or not order.known:
        return _usual(step, index, several)
    times = several / order.several
    return order.blocks * int(times) if times.is_integer() else None


def _interleaved(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    order = step.given[0][1]
    if not step.sizes.dimensions(step.given[0][0].shape):
        return (several,) if len(step.given) > 1 or several == 1 else None  # each of several as often as there are rows
    if not order.blocks or not order.known or several < order.several:
        return _usual(step, index, several)
    return _scaled(order.blocks, several / order.several)


def _expanded(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    order = step.given[0][1]
    return (several,) if not order.blocks and order.known else _usual(step, index, several)


def _scattered(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    """What numbers write into lies as before; into the same for all, as what is written all over or by a mask."""
    order = step.given[0][1]
    if not order.blocks or not order.known or order.several != several:
        return _usual(step, index, several)
    if not order.alike or several <= 1:
        return order.blocks
    written = [each for tensor, each in step.given[1:] if each.blocks and not step.sizes.depends_on_data(tensor.shape)]
    if any(each.numbers and each.several == 1 for each in written):  # a place of each row's: perhaps halves
        return None
    kinds = {each.blocks for each in written if len(each.blocks) > 1 or not each.known}
    if not kinds:
        return (several,)
    (blocks,) = kinds if len(kinds) == 1 else ((),)
    return blocks if sum(blocks) == several and all(each.known for each in written) else None


def _picked(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    """What a mask picks stays in its order."""
    base, order = step.given[0]
    by_mask = any(each.dtype == torch.bool for each, _ in step.given[1:])
    if by_mask and order.known and len(order.blocks) == 1 and step.sizes.dimensions(base.shape) == [0]:
        return (several,)
    return _usual(step, index, several)


def _turned(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    """Turned round, or on, along the rows."""
    given = step.given[0][0]
    found = step.argument("dims")
    turned = found if isinstance(found, list | tuple) else [0] if found is None else [found]
    dims = step.sizes.dimensions(given.shape)
    if any(each % given.dim() in dims for each in turned) or (step.name == "roll" and not turned):
        return None
    return _usual(step, index, several)


def _cut_out(step: RowStep, index: int, several: float) -> tuple[float, ...] | None:
    """A part of a dimension: whole blocks, or every so manieth of entries that lie row by row."""
    given, order = step.given[0]
    dim = step.argument("dim", 0)
    found = step.sizes.dimensions(given.shape)
    if found != [dim % given.dim()] or not order.known:
        return _usual(step, index, several)
    if step.argument("step", 1) != 1:
        return (several,) if len(order.blocks) == 1 else None
    start = _start(step, index, found[0])
    if start is None:
        return None
    edges = [0.0, *accumulate(order.blocks)]
    try:
        return order.blocks[edges.index(start) : edges.index(start + several)]
    except ValueError:
        return (several,) if order.alike else None


def _start(step: RowStep, index: int, dim: int) -> float | None:
    """Where a part begins, in entries for each row."""
    if len(step.made) > 1 or step.name not in _SLICING:
        sizes = [step.sizes.many(each.shape[dim]) for each in step.made[:index]]
        return sum(sizes) / MANY_ROWS
    start = step.argument("start")
    if isinstance(start, torch.Tensor):
        return None
    first = 0 if start is None else step.sizes.many(start)
    return (first + step.sizes.many(step.given[0][0].shape[dim]) * (first < 0)) / MANY_ROWS


_SLICING = frozenset(("slice", "narrow", "slice_copy", "narrow_copy"))
_SPLITTING = frozenset((
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
    "split_copy", "split_with_sizes_copy", "vsplit", "hsplit", "dsplit",
))  # fmt: skip
_EXPANDING = frozenset(("expand", "expand_as", "broadcast_to", "expand_copy"))
_JOINING = frozenset(("cat", "concat", "concatenate", "vstack", "row_stack", "hstack", "column_stack", "dstack"))
_SHAPING = frozenset((
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_copy", "_reshape_alias", "reshape_as", "view_as",
    "_reshape_copy", "ravel",
))  # fmt: skip
_RULES: dict[str, Callable[[RowStep, int, float], tuple[float, ...] | None]] = {
    **dict.fromkeys(_SLICING | _SPLITTING, _cut_out),
    **dict.fromkeys(_EXPANDING, _expanded),
    **dict.fromkeys(_JOINING, _joined),
    **dict.fromkeys(_SHAPING, _shaped),
    **dict.fromkeys(SCATTERING, _scattered),
    **dict.fromkeys(("repeat", "tile"), _repeated),
    **dict.fromkeys(("index", "_unsafe_index", "masked_select"), _picked),
    **dict.fromkeys(("flip", "roll", "rot90", "flipud"), _turned),
    "repeat_interleave": _interleaved,
}


_COUNTING = frozenset((
    "arange", "range", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "randperm", "combinations",
))  # fmt: skip
_REMAINDERS = frozenset(("remainder", "fmod", "remainder_", "fmod_"))
_PICKING = frozenset(("index", "_unsafe_index", "index_select", "gather", "embedding", "take_along_dim")) | SCATTERING
_LOSSES = frozenset(("nll_loss_forward", "nll_loss", "nll_loss_nd", "nll_loss2d_forward", "cross_entropy_loss"))
_COPYING = frozenset(("_to_copy", "to", "clone", "contiguous", "detach", "alias"))
_ENDING = frozenset((
    "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", "bincount", "take", "searchsorted", "bucketize",
    "mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "dot", "einsum", "linear",
))  # fmt: skip
"""They make something of the rows that numbers mean."""


def _numbers_of(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Whether a result of an operation has numbers of rows, and in which column alone; None: it may be any."""
    dims = step.sizes.dimensions(step.made[index].shape)
    if not dims or step.name in CREATING or step.target is None:
        return False, None
    if step.name in _COUNTING or (step.name == "repeat_interleave" and len(step.args) == len(step.given) == 1):
        return True, None  # the latter says which one each is of
    return _NUMBER_RULES.get(step.name, _left)(step, index)


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


def _joined_numbers(step: RowStep, index: int) -> tuple[bool, int | None]:
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


def _of_columns(step: RowStep, index: int) -> tuple[bool, int | None]:
    """Columns beside that of the numbers have none."""
    given, order = step.given[0]
    if order.column is None or step.argument("dim", 0) % given.dim() != given.dim() - 1:
        return order.numbers, order.column
    if step.name in ("select", "unbind"):
        which = index if step.name == "unbind" else step.argument("index")
        return not isinstance(which, int) or which % int(given.shape[-1]) == order.column, None
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
    return len(divisors) == 1 and len(blocks) == 1 and blocks[0] % step.sizes.many(divisors[0]) == 0


_NUMBER_RULES = {
    **dict.fromkeys(("nonzero", "nonzero_static", "argwhere", "nonzero_numpy", "where"), _found),
    **dict.fromkeys(("cumsum", "cumprod", "cumsum_", "cumprod_"), _summed),
    **dict.fromkeys(_JOINING | {"stack"}, _joined_numbers),
    **dict.fromkeys(("slice", "narrow", "select", "unbind"), _of_columns),
}
