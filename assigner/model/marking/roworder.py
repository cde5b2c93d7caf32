"""In which order an operation leaves the rows of what it is given.

A dimension of rows is a number of blocks, in each of which so many entries for each row lie row by row:

    x                                   (1)
    x.repeat_interleave(2, 0), x.unflatten(0, (-1, 2)) as one dimension     (2)     joined as in the model
    cat((a, b)), x.repeat(2, 1), x.expand(2, ...).flatten(0, 1)             (1, 1)  joined: another order
    of these: chunk(2), [:rows], unflatten(0, (2, -1))                      (1)
    of these: [::2], unflatten(0, (-1, 2)), [mask]                          not known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from assigner.model.deferred.mutation import is_random, named_arguments

if TYPE_CHECKING:
    from assigner.model.marking.cutter import Symbols

_MOST_BLOCKS = 65_536  # with more, where a size in front is of millions, nobody keeps count
_ROWS = 120
"""So many rows are put in for the symbols: parts of them are whole numbers."""

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


class RowSizes:
    """What sizes say of rows.

    Args:
        symbols: Those of a capture.
    """

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._several: dict[Any, float | None] = {}

    def number(self, size: Any) -> int:
        """A size for one number of rows."""
        return self._symbols.number(size, _ROWS)

    def several(self, size: Any) -> float | None:
        """How many entries for each row a dimension has; None: its size is none of rows, NaN: in no ratio."""
        if not isinstance(size, torch.SymInt):
            return None
        expression = size.node.expr
        if expression not in self._several:
            one, two = (self._symbols.number(size, n * _ROWS) for n in (1, 2))
            ratio = one / _ROWS if two == 2 * one else math.nan
            self._several[expression] = ratio if self._symbols.has_rows(size) else None
        return self._several[expression]

    def dimensions(self, shape: Sequence[Any]) -> list[int]:
        """Those that have rows."""
        return [dim for dim, size in enumerate(shape) if self.several(size) is not None]

    def depends_on_data(self, shape: Sequence[Any]) -> bool:
        """Whether a size of a tensor does."""
        return any(free_unbacked_symbols(size) for size in shape if isinstance(size, torch.SymInt))

    def plain(self, tensor: torch.Tensor) -> RowOrder:
        """That of a tensor of which nothing is known but its shape."""
        found = [each for size in tensor.shape if (each := self.several(size)) is not None]
        return RowOrder((found[0],), known=not math.isnan(found[0])) if len(found) == 1 else RowOrder()

    def before(self, shape: Sequence[Any], dim: int) -> int:
        """How many times a tensor runs through a dimension: the product of those in front of it."""
        return math.prod(self.number(size) for size in shape[:dim])


@dataclass(frozen=True)
class RowStep:
    """An operation, with what is known of what it is given.

    Args:
        target: What is called.
        name: Its name.
        args: Its arguments, tensors in the places of nodes.
        kwargs: Those by name.
        given: The tensors among them, in order, with what is known of each.
        made: The tensors that it gives.
        sizes: What their sizes say.
    """

    target: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    given: Sequence[tuple[torch.Tensor, RowOrder]]
    made: Sequence[torch.Tensor]
    sizes: RowSizes

    def argument(self, name: str, default: Any = None) -> Any:
        """One of the arguments by its name in the schema."""
        if not isinstance(self.target, torch._ops.OpOverload):
            return default
        return named_arguments(self.target, self.args, self.kwargs).get(name, default)

    def order_of(self, value: Any) -> RowOrder:
        """What is known of an argument."""
        return next((order for each, order in self.given if each is value), RowOrder())


def order_of(step: RowStep, index: int) -> RowOrder:
    """In which order one of the results of an operation has the rows."""
    made = step.made[index]
    plain = step.sizes.plain(made)
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
    before, after = step.sizes.before(given.shape, dim), step.sizes.before(step.made[index].shape, made_dim)
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
        sizes = [step.sizes.number(each.shape[dim]) for each in step.made[:index]]
        return sum(sizes) / _ROWS
    start = step.argument("start")
    if isinstance(start, torch.Tensor):
        return None
    first = 0 if start is None else step.sizes.number(start)
    return (first + step.sizes.number(step.given[0][0].shape[dim]) * (first < 0)) / _ROWS


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
