"""A tree of tensors and Python values, cut along the rows: tensors by their dimension, sequences by their length.

    rows 5, micro-batches 2    ids (5, 16)    by time (16, 5)    boxes: a list of 5    class weights (20,)
    the first                  ids[:3]        by time[:, :3]     boxes[:3]             whole
    the second                 ids[3:]        by time[:, 3:]     boxes[3:]             whole

Which parts carry rows the workload's own batches tell (`assigner.model.marking.rows`). Where they do not, it is what
has as many entries as the batch has rows. What might mean two things is refused, as is what cannot be cut.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.marking.rows import NOTHING, Carry, RowLeaves, entries_of, is_plain, row_length

_OWN_KINDS = (torch.Tensor, nn.Parameter, nn.Buffer)
_ONE = "with one micro-batch (solve with --micro-batches 1) the batch stays whole"


def fair_sizes(rows: int, count: int) -> tuple[int, ...]:
    """Rows of each of `count` micro-batches, at most one apart, the larger ones first."""
    least, more = divmod(rows, count)
    return (least + 1,) * more + (least,) * (count - more)


@dataclass(frozen=True)
class Division:
    """How many rows each micro-batch of a batch gets."""

    sizes: tuple[int, ...]
    counts: bool = False  # a number of all rows goes whole to every micro-batch, as a summed loss may divide by it

    @property
    def rows(self) -> int:
        """Of the whole batch."""
        return sum(self.sizes)

    def cut(self, tree: Any, known: RowLeaves, where: str) -> list[Any]:
        """The tree of each micro-batch, by what is known of its rows.

        Raises:
            UsageError: there are several micro-batches, and a part cannot be cut, has other rows, or might carry the
                rows in two ways.
        """
        if len(self.sizes) > 1 and known.carry is Carry.WHOLE:
            self._check_whole(tree, known, where)
        whole = len(self.sizes) == 1 or known.carry is Carry.WHOLE or tree is None
        if not whole:
            self._check_known(tree, known, where)
        if whole or is_plain(tree):
            return [tree] * len(self.sizes)
        if isinstance(tree, torch.Tensor):
            return self._cut_tensor(tree, known.dimension, where)
        if known.carry is Carry.ROWS:
            return self._slices(tree, where)
        entries = entries_of(tree)
        nodes = [] if entries is None else known.below(entries, named=isinstance(tree, Mapping))
        known_inside = any(node != NOTHING for node in nodes)
        if row_length(tree) == self.rows and isinstance(tree, Sequence | np.ndarray) and not known_inside:
            self._check_meaning(tree, where)
            return self._slices(tree, where)
        if entries is None and not isinstance(tree, np.ndarray):
            raise UsageError(
                f"{where} is a {type(tree).__name__}, which cannot be cut into {len(self.sizes)} micro-batches",
                hint="give tensors and plain values, in tuples, lists and dicts; " + _ONE,
            )
        return self._cut_entries(
            tree, [(*entry, node) for entry, node in zip(entries or (), nodes, strict=True)], where
        )

    def _check_known(self, tree: Any, known: RowLeaves, where: str) -> None:
        """What is known to carry the rows has as many, and what goes with them in another way stays out."""
        if known.carry is Carry.ROWS and (length := row_length(tree, known.dimension)) != self.rows:
            raise UsageError(
                f"the batch has {self.rows} rows, and {where} has {'none' if length is None else length}",
                hint="give every row its entry",
            )
        if known.carry in (Carry.VARIES, Carry.MIXED) and not (self.counts and _is_number(tree)):
            hint = "give each row of the batch its own entry, along one dimension of a tensor or in a list, and" + (
                " add them up where the number is needed, with Workload.weight for what they count; a loss divided by"
                " one of the whole batch goes with reduction='sum'; "
                if _is_number(tree)
                else " flatten in the loss; "
            )
            raise UsageError(
                f"{where} cannot be cut into {len(self.sizes)} micro-batches: it is {known.why}",
                hint=hint + "a loss of the whole batch is loss_over='batch'; " * (known.carry is Carry.MIXED) + _ONE,
            )

    def _check_whole(self, tree: Any, known: RowLeaves, where: str) -> None:
        """What goes whole has no rows where the examples' broadcasts, as a mask of (1, T) for one of (rows, T).

        Nor where the examples have another size, but for a length that may vary, as the number of steps.
        """
        is_sequence = isinstance(tree, list | tuple | deque) and not isinstance(tree, torch.Size)
        if not is_sequence and not isinstance(tree, torch.Tensor | np.ndarray):
            return
        shape = (len(tree),) if is_sequence else tuple(tree.shape)
        made = known.sizes or (len(known.children),) * bool(known.children)
        alike = made[:1] if is_sequence else made
        theirs = alike if len(alike) == len(shape) else (1,) * len(shape)  # a number broadcasts, too
        lengths = () if is_sequence else known.lengths
        if any(
            size == self.rows and (its == 1 or (its != size and dim not in lengths))
            for dim, (size, its) in enumerate(zip(shape, theirs, strict=True))
        ):
            raise UsageError(
                f"{where} of shape {shape} {_TWO_MEANINGS}: Workload.batch makes"
                f" {f'one of {made}' if made else 'a single value'} for any number of rows",
                hint="have it make them of the data's shape, for as many rows as it is asked; " + _ONE,
            )

    def _cut_entries(self, tree: Any, entries: Sequence[tuple[Any, Any, RowLeaves]], where: str) -> list[Any]:
        """An inner node entry by entry, each with its key and what is known of it."""
        if not entries:
            return [tree] * len(self.sizes)
        cut = [self.cut(each, node, f"{where}[{key!r}]") for key, each, node in entries]
        _, structure = pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)
        return [pytree.tree_unflatten(list(part), structure) for part in zip(*cut, strict=True)]

    def _cut_tensor(self, tensor: torch.Tensor, dimension: int, where: str) -> list[torch.Tensor]:
        check_tensor(tensor, where)
        if row_length(tensor, dimension) != self.rows:
            return [tensor] * len(self.sizes)
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{where} is a tensor of layout {tensor.layout}, which cannot be cut into {len(self.sizes)}"
                " micro-batches",
                hint="give it dense; " + _ONE,
            )
        parts = torch.split(tensor, list(self.sizes), dimension)
        return [part.contiguous() for part in parts] if dimension and tensor.is_contiguous() else list(parts)

    def _slices(self, sequence: Any, where: str) -> list[Any]:
        """The parts of something as long as there are rows, of its own kind."""
        ends = list(itertools.accumulate(self.sizes))
        spans = [(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]
        if isinstance(sequence, deque):
            return [type(sequence)(itertools.islice(sequence, *span)) for span in spans]
        try:
            parts = [sequence[start:end] for start, end in spans]
            sound = all(
                type(part) is type(sequence) and len(part) == size for part, size in zip(parts, self.sizes, strict=True)
            )
        except (TypeError, ValueError, IndexError, KeyError, AttributeError):
            sound = False
        if not sound:
            raise UsageError(
                f"{where}, a {type(sequence).__name__}, has an entry for each row and cannot be sliced",
                hint="give it as a list; " + _ONE,
            )
        return parts

    def _check_meaning(self, sequence: Any, where: str) -> None:
        """A sequence that the examples do not show, as long as there are rows: its entries must be the rows."""
        tensors = [each for each in pytree.tree_leaves(list(sequence)) if isinstance(each, torch.Tensor)]
        settings = self.rows <= _FEW and all(isinstance(each, bool | int | float) for each in sequence)
        if settings or any(row_length(each) == self.rows for each in tensors):
            raise UsageError(
                f"{where} {_TWO_MEANINGS}",
                hint="have Workload.batch make batches of this structure for any number of rows: they tell; " + _ONE,
            )


_TWO_MEANINGS = "has as many entries as the batch has rows: it might be cut, or go whole to every micro-batch"
_FEW = 4  # so short a sequence of numbers may as well be a size or a padding


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_tensor(tensor: torch.Tensor, where: str) -> None:
    """Refuse what a plain tensor is not, a class of its own or attributes: it would be lost in a graph or a part."""
    if type(tensor) not in _OWN_KINDS or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
        raise UsageError(
            f"{where} is a {kind}: what it has beyond a plain tensor would be lost",
            hint="give plain tensors, as tensor.as_subclass(torch.Tensor), and the rest beside them",
        )
    hung = [name for name in vars(tensor) if not name.startswith("_")]
    if hung:
        raise UsageError(
            f"{where} is a tensor with an attribute {hung[0]!r} hung on it, which would be lost",
            hint="hand it over beside the tensor, as an input or a target of its own",
        )
