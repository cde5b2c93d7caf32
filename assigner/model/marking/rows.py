"""Which parts of a batch carry its rows: those with one dimension, or a length, that follows the rows asked for.

A size alone does not tell: of a batch of 8 rows, a table of 8 entries looks like rows. So two batches are compared:

    rows asked for    ids        by time    table     boxes              what carries rows
    4                 (4, 16)    (16, 4)    (8,)      a list of 4
    8                 (8, 16)    (16, 8)    (8,)      a list of 8        ids and boxes in the first dimension,
                                                                         by time in the second
What follows the rows in another way (a tensor of all images' boxes, one flattened over rows and time, rows by rows) is
known too: it cannot be cut. Where everything is a multiple of the rows asked for (8 and 16 for pairs), so many belong
together.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.workload import Batch, call_arguments

if TYPE_CHECKING:
    from assigner.model.workload import Workload

EXAMPLE_ROWS = 4  # not 1, which torch.export would take for a fixed size

Sizes = tuple[int, int]
_COUNT = "the number of the batch's rows"
_OTHERS, _FEW_PAIRS = 24, 3
"""More pairs of batches that tell whether a number grows with the rows; so few tell that it never changes."""
_GROWTH, _CERTAIN = 0.25, 4.0
"""It does if it is larger by so much of itself, and by so many times what the draws make uncertain."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device, torch.Size)


class Carry(StrEnum):
    """How a part of a batch goes with the batch's rows."""

    ROWS = "one of its dimensions, or its length, is the rows"
    WHOLE = "it has nothing to do with them"
    MIXED = "it has the rows in its first dimension, and in another one"
    VARIES = "it differs with them in another way"
    UNKNOWN = "the examples do not tell"


@dataclass(frozen=True)
class RowLeaves:
    """What is known of a tree, node by node.

    Args:
        carry: How this node goes with the rows; UNKNOWN for one whose children say more.
        children: Of an inner node, by key or position; a list is as good as a tuple.
        why: Where it can neither be cut nor go whole: what it is, for errors.
        dimension: Of a tensor, the one that has the rows; of several the first.
        sizes: Of a tensor or array that goes whole; nothing of what has none, as a number.
        lengths: The dimensions of these that may have any size, as the number of steps, which other parts have, too.
    """

    carry: Carry = Carry.UNKNOWN
    children: Mapping[Any, RowLeaves] = field(default_factory=dict)
    why: str = ""
    dimension: int = 0
    sizes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    def below(self, entries: Sequence[tuple[Any, Any]], *, named: bool) -> list[RowLeaves]:
        """What is known of a node's entries: by name those that are known, by position only all or none."""
        if not named and len(entries) != len(self.children):
            return [NOTHING] * len(entries)
        return [self.children.get(key, NOTHING) for key, _ in entries]


NOTHING = RowLeaves()


def may_carry(known: RowLeaves, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> list[int | None]:
    """For each leaf of a tree the dimension that may be the rows; None: it is no tensor that may have them.

    Where nothing is known of the tree, it may be any tensor's first dimension.
    """
    tree = pytree.tree_unflatten(list(leaves), structure)
    if any(not isinstance(value, torch.Tensor) for value, _ in carriers(known, tree)):
        return [None] * len(leaves)  # a list's length is a part of the structure: such a tree is of one number of rows
    found: list[int | None] = []
    for each, part in known_parts(known, tree):
        leaf = isinstance(part, torch.Tensor) or each.carry is not Carry.ROWS  # of a list of rows no entry has them
        carries = leaf and each.carry in (Carry.ROWS, Carry.MIXED, Carry.UNKNOWN)
        found += [each.dimension if carries else None] * len(pytree.tree_leaves(part))
    depths = [leaf.dim() if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
    may = [dim if dim is not None and dim < depth else None for dim, depth in zip(found, depths, strict=True)]
    if any(dim is not None for dim in may) or _elsewhere(known):
        return may
    return [0 if depth else None for depth in depths]


def _elsewhere(known: RowLeaves) -> bool:
    """The rows are known to be somewhere, as in a list."""
    return known.carry is Carry.ROWS or bool(known.why) or any(map(_elsewhere, known.children.values()))


def known_parts(known: RowLeaves, tree: Any) -> Iterator[tuple[RowLeaves, Any]]:
    """A tree's largest parts of which one thing is known, or nothing, in the order that pytree flattens them."""
    entries = entries_of(tree) if known.children and known.carry is Carry.UNKNOWN else None
    if entries is None:
        yield known, tree
        return
    for node, (_, child) in zip(known.below(entries, named=isinstance(tree, Mapping)), entries, strict=True):
        yield from known_parts(node, child)


def entries_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """The entries of an inner node by key or position, as pytree orders them; None: it is a leaf."""
    if isinstance(tree, torch.Tensor | str | PackedSequence | torch.Size):
        return None
    if type(tree) in (tuple, list, dict):  # as pytree would, in a tenth of its time
        return list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    children, structure = pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)
    if structure.is_leaf():
        return None
    return list(zip(tree if isinstance(tree, dict) else range(len(children)), children, strict=True))


def is_plain(value: Any) -> bool:
    """A value that means the same for any part of the batch: a number, text, a type."""
    return isinstance(value, _PLAIN)


def row_length(value: Any, dimension: int = 0) -> int | None:
    """How many rows a node has if it carries them, a tensor in this dimension; None: it cannot."""
    if isinstance(value, torch.Tensor):
        return value.size(dimension) if value.dim() > dimension and not value.is_nested else None
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    if is_plain(value) or isinstance(value, Mapping | PackedSequence) or hasattr(value, "_fields"):
        return None
    return len(value) if hasattr(value, "__len__") else None


def carriers(known: RowLeaves, tree: Any) -> Iterator[tuple[Any, int | None]]:
    """The parts of a tree that are known to have the rows, and how many; None: one that cannot have them."""
    for each, part in known_parts(known, tree):
        if each.carry in (Carry.ROWS, Carry.MIXED) or (each.dimension and isinstance(part, torch.Tensor)):
            yield part, row_length(part, each.dimension)


@dataclass(frozen=True)
class BatchRows:
    """What is known of a batch.

    Args:
        inputs: Of the model's (args, kwargs).
        targets: Of the targets.
        group: As many rows belong together, and are not cut apart: the tensors are so many times as long as the rows
            that `Workload.batch` was asked for.
    """

    inputs: RowLeaves = NOTHING
    targets: RowLeaves = NOTHING
    group: int = 1

    def counted(self, rows: int) -> int:
        """So many rows as `Workload.batch` counts them: in groups, the last of which may not be whole."""
        return -(-rows // self.group)


def batch_rows(workload: Workload, example: Batch | None = None) -> BatchRows:
    """What the workload's own batches of two row counts say. Nothing where it makes none, or their sizes are one.

    The example is one of `EXAMPLE_ROWS` rows, where there is one already.
    """
    try:
        small = workload.make_batch(EXAMPLE_ROWS, workload.seed) if example is None else example
        large = workload.make_batch(2 * EXAMPLE_ROWS, workload.seed)
    except UsageError:  # a script that brings its own batches needs no maker for every number of rows
        return BatchRows()
    asked = EXAMPLE_ROWS, 2 * EXAMPLE_ROWS
    one, other = _tree(small), _tree(large)
    of_inputs = [*_sizes(one[0], other[0])]
    every = [*of_inputs, *_sizes(one[1], other[1])]
    follows = [sizes[0] for sizes in of_inputs if sizes and sizes[0][0] != sizes[0][1]]
    if asked in follows or any(asked in sizes[1:] for sizes in every):
        rows = asked  # the first dimension may be steps of time, whose number follows the draws
    elif follows:
        rows = follows[0]
    else:
        return BatchRows()
    lengths = {size for sizes in every for dim, size in enumerate(sizes) if dim or rows in sizes} - {rows}
    may_count = workload.reduction == "sum" or workload.loss_over == "batch"

    @functools.cache
    def drawn(n: int) -> list[Any]:
        """Further batches of both row counts, made when they are asked for."""
        return [_tree(workload.make_batch(times * EXAMPLE_ROWS, workload.seed + 1 + n)) for times in (1, 2)]

    known = _learnt(one, other, _Examples(rows, lengths, may_count, drawn)).children
    times, rest = divmod(rows[0], EXAMPLE_ROWS)
    return BatchRows(known[0], known[1], 1 if rest or rows[1] != 2 * rows[0] else times)


def _tree(batch: Batch) -> tuple[Any, Any]:
    """The model's arguments, and the targets."""
    return call_arguments(batch[0]), batch[1]


def _sizes(one: Any, other: Any) -> Iterator[list[Sizes]]:
    """Sizes in both trees of every tensor, and lengths of everything else that has one, as far as the trees agree."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dim() == other.dim() and not (one.is_nested or other.is_nested):
            yield list(zip(one.shape, other.shape, strict=True))
        return
    mine, theirs = row_length(one), row_length(other)
    if mine is not None and theirs is not None and mine != theirs:
        yield [(mine, theirs)]
        return
    pairs = _paired(one, other)
    for a, b in pairs.values() if pairs is not None else ():
        yield from _sizes(a, b)


def _paired(one: Any, other: Any) -> dict[Any, tuple[Any, Any]] | None:
    """The entries of two inner nodes that are alike; None: they are not."""
    mine, theirs = entries_of(one), entries_of(other)
    if mine is None or theirs is None or type(one) is not type(other):
        return None
    found, rest = dict(mine), dict(theirs)
    return {key: (found[key], rest[key]) for key in found} if found.keys() == rest.keys() else None


@dataclass(frozen=True)
class _Examples:
    """Two batches beside each other.

    Args:
        rows: Both numbers of rows.
        lengths: Sizes of other dimensions, as the length that sequences are padded to.
        may_count: What is counted of all rows is right beside some of them: the losses of parts are added up, or one is
            computed of the whole batch.
        drawn: Makes more such batches, of other draws, by their number.
        path: Keys and positions down to the parts that are looked at.
    """

    rows: Sizes
    lengths: set[Sizes]
    may_count: bool
    drawn: Callable[[int], list[Any]]
    path: tuple[Any, ...] = ()

    def elsewhere(self) -> Iterator[list[Any]]:
        """The same part of other batches."""
        for n in range(_OTHERS):
            yield [_part(tree, self.path) for tree in self.drawn(n)]


def _part(tree: Any, path: Sequence[Any]) -> Any:
    """What lies at the end of keys and positions; None: there is nothing."""
    for key in path:
        tree = dict(entries_of(tree) or ()).get(key)
    return tree


def _learnt(one: Any, other: Any, examples: _Examples) -> RowLeaves:
    """What two trees say, the first one for the first number of rows."""
    rows = examples.rows
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one is not other:
        return _learnt_tensor(one, other, examples)
    if is_plain(one) and is_plain(other):
        return NOTHING if one is None or other is None else _learnt_number(one, other, examples)  # or may be anything
    mine, theirs = row_length(one), row_length(other)
    if mine is not None and theirs is not None and mine != theirs:
        why = f"{mine} long for {rows[0]} rows, and {theirs} for {rows[1]}"
        return RowLeaves(Carry.ROWS) if (mine, theirs) == rows else RowLeaves(Carry.VARIES, why=why)
    pairs = _paired(one, other)
    if pairs is None:
        return _learnt_object(one, other, examples)
    children = {key: _learnt(a, b, replace(examples, path=(*examples.path, key))) for key, (a, b) in pairs.items()}
    if mine and all(map(is_plain, one)) and not any(child.why for child in children.values()):
        return RowLeaves(Carry.WHOLE, children)  # a list of settings: none of its entries has to be looked at
    return RowLeaves(children=children)


def _learnt_number(one: Any, other: Any, examples: _Examples) -> RowLeaves:
    """A number, text or tensor of one entry: the same for any part of a batch, unless it counts what rows have."""
    mine, theirs = map(_counted, (one, other))
    if mine is None or theirs is None:
        return RowLeaves(Carry.WHOLE)
    if (mine, theirs) == examples.rows:
        return RowLeaves(Carry.VARIES, why=_COUNT)
    if examples.may_count or (mine, theirs) in examples.lengths or not _grows([(mine, theirs)], examples):
        return RowLeaves(Carry.WHOLE)
    few, many = examples.rows
    return RowLeaves(
        Carry.VARIES, why=f"a number that grows with the rows, {mine:g} for {few} and {theirs:g} for {many}"
    )


def _grows(pairs: list[tuple[float, float]], examples: _Examples) -> bool:
    """Whether a number is larger for more rows, by more than what is drawn anew in each batch tells."""
    with contextlib.suppress(UsageError):  # what the batches at hand say counts
        for a, b in examples.elsewhere():
            mine, theirs = map(_counted, (a, b))
            if mine is None or theirs is None:
                return False
            pairs.append((mine, theirs))
            if len(pairs) > _FEW_PAIRS and len({each for pair in pairs for each in pair}) == 1:
                return False  # a setting
    few, many = (np.array(each) for each in zip(*pairs, strict=True))
    spread = math.sqrt((few.var() + many.var()) / max(len(pairs) - 1, 1))
    more = abs(many.mean()) - abs(few.mean())
    return bool(more >= _GROWTH * abs(few.mean()) and more > _CERTAIN * spread)


def _counted(value: Any) -> float | None:
    """What may count or add up; None: it does not."""
    if isinstance(value, torch.Tensor):
        value = None if value.is_meta or value.is_complex() else value.item()
    elif isinstance(value, np.generic):
        value = value.item()
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _learnt_object(one: Any, other: Any, examples: _Examples) -> RowLeaves:
    if one is other or (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return _whole(one, other, examples)  # the same for both, or as long
    if one is None or other is None:
        return NOTHING
    if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) != set(other):
        return RowLeaves(Carry.VARIES, why="a mapping with other keys for other rows")
    if entries_of(one) is None and entries_of(other) is None:
        return RowLeaves(Carry.VARIES, why=f"a {type(one).__name__}")
    return NOTHING


def _learnt_tensor(one: torch.Tensor, other: torch.Tensor, examples: _Examples) -> RowLeaves:
    rows = examples.rows
    if one.dim() != other.dim() or one.is_nested or other.is_nested:
        return RowLeaves(Carry.VARIES, why="nested" if one.is_nested else "of another number of dimensions")
    sizes = list(zip(one.shape, other.shape, strict=True))
    follow = [dim for dim, pair in enumerate(sizes) if pair == rows]
    if len(follow) == 1:
        numbers = _numbers_rows if follow[0] else _are_edges
        counts = all(numbers(each, count) for each, count in zip((one, other), rows, strict=True))
        why = f"a tensor with the rows in dimension {follow[0]}, whose values are numbers of rows, as a graph's edges"
        return RowLeaves(Carry.VARIES, why=why) if counts else RowLeaves(Carry.ROWS, dimension=follow[0])
    if follow:
        why = f"a tensor with the rows in dimensions {' and '.join(map(str, follow))}"
        return RowLeaves(Carry.MIXED if follow[0] == 0 else Carry.VARIES, why=why, dimension=follow[0])
    if one.numel() == other.numel() == 1 and (number := _learnt_number(one, other, examples)).why:
        return number
    if not sizes or sizes[0][0] == sizes[0][1] or sizes[0] in examples.lengths:
        return _whole(one, other, examples)
    return RowLeaves(
        Carry.VARIES, why=f"a tensor with {sizes[0][0]} entries for {rows[0]} rows, and {sizes[0][1]} for {rows[1]}"
    )


def _whole(one: Any, other: Any, examples: _Examples) -> RowLeaves:
    pairs = [*zip(getattr(one, "shape", ()), getattr(other, "shape", ()), strict=False)]
    known = isinstance(one, torch.Tensor)  # of arrays nobody has looked for equal lengths
    lengths = tuple(dim for dim, pair in enumerate(pairs) if pair in examples.lengths or not known)
    return RowLeaves(Carry.WHOLE, sizes=tuple(size for size, _ in pairs), lengths=lengths)


def _numbers_rows(tensor: torch.Tensor, rows: int) -> bool:
    """Its values count rows, up to the last one: in a part of the batch they would mean other rows."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return False
    return int(tensor.min()) >= 0 and int(tensor.max()) == rows - 1


def _are_edges(tensor: torch.Tensor, rows: int) -> bool:
    """Several such numbers in each row, all up to the last or the one before: pairs of rows, in the first dimension."""
    is_paired = tensor.dim() == 2 and tensor.size(1) > 1 and _numbers_rows(tensor, rows)
    return is_paired and int(tensor.max(0).values.min()) >= rows - 2


def find_carriers(
    known: RowLeaves, structure: pytree.TreeSpec, leaves: Sequence[Any]
) -> tuple[int | None, list[int | None]]:
    """The rows of the example inputs, and in which dimension each leaf carries them."""
    may = may_carry(known, structure, leaves)
    rows = next((leaf.size(dim) for leaf, dim in zip(leaves, may, strict=True) if dim is not None), None)
    return rows, [
        dim if dim is not None and leaf.size(dim) == rows else None for leaf, dim in zip(leaves, may, strict=True)
    ]


def in_groups(reason: str) -> str:
    """More of a hint where a forward fails as one does whose rows belong together, as pairs or triplets."""
    if "is invalid for input of size" not in reason and "is not divisible by" not in reason:
        return ""
    return (
        ". Where several rows belong together, let Workload.batch(rows) make as many groups of rows that follow each"
        " other, in tensors that are twice or three times as long: a batch is then cut between groups"
    )
