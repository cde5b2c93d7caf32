"""Which outputs cannot be joined of micro-batches along their rows, and why.

    cat((a, b))                 a1 a2 b1 b2: of two micro-batches a1 b1 a2 b2, where the model has a1 a2 b1 b2
    x.transpose(0, 1).flatten(0, 1)      likewise, of (rows, steps) as steps x rows
    x.flatten(0, 1), x.repeat_interleave(2, 0)      what is of one row lies together: joined as in the model
    arange(len(x))              0 1 0 1: of two micro-batches, where the model has 0 1 2 3

The operations of the graph are gone through, and for each call of it those that its forward ran on fake tensors. Of a
module that was learnt from calls with values they are not known: what it makes of values in blocks is in blocks, if it
has as many for each row, and else what it makes lies row by row.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import storage_of, tensor_leaves, written_tensors
from assigner.model.marking.nodes import call_of
from assigner.model.marking.opaque import is_call
from assigner.model.marking.operations import Listed, ListedWrites, Way
from assigner.model.marking.roworder import RowOrder, RowStep, order_of, plain_order
from assigner.model.marking.writing import is_write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.model.marking.capture import Capture
    from assigner.model.marking.domain import Symbols


class Unjoinable(StrEnum):
    """Why an output is not that of a batch's micro-batches behind each other."""

    BLOCKS = "the rows of a micro-batch lie there in several blocks, as of torch.cat((a, b)), or in another order"
    NUMBERS = "it has numbers of rows in it, as of torch.arange(len(x)), which begin anew in each micro-batch"
    PAIRS = "several of its dimensions are the rows of a micro-batch, as of pairs of rows"
    COUNT = "it follows from the number of a micro-batch's rows"


def unjoinable(captured: Capture, outputs: Sequence[Any], symbols: Symbols) -> list[Unjoinable | None]:
    """For each leaf of a captured forward's output why those of micro-batches cannot be joined.

    None: they can, or it has no rows. A leaf is a node of its graph or a plain value.
    """
    walk = _Walk(symbols)
    walk.graph(captured.graph)
    return [walk.reason(each.meta.get("val")) if isinstance(each, fx.Node) else None for each in outputs]


class _Walk:
    """Goes through operations in turn, and knows how each value has the rows."""

    def __init__(self, sizes: Symbols) -> None:
        self._sizes = sizes
        self._orders: dict[int, RowOrder] = {}
        self._sharing: dict[int, list[torch.Tensor]] = defaultdict(list)

    def reason(self, value: Any) -> Unjoinable | None:
        """Why an output cannot be joined."""
        if isinstance(value, torch.SymInt):
            return Unjoinable.COUNT if self._sizes.several(value) is not None else None
        if not isinstance(value, torch.Tensor):
            return None
        dims, order = self._sizes.dimensions(value.shape), self._order(value)
        if len(dims) > 1:  # those that depend on data may be the same for all micro-batches
            known = [dim for dim in dims if not free_unbacked_symbols(value.shape[dim])]
            return Unjoinable.PAIRS if len(known) > 1 else None
        if dims and not order.lies_row_by_row:
            return Unjoinable.BLOCKS
        return Unjoinable.NUMBERS if dims and order.numbers else None

    def graph(self, graph: fx.Graph) -> None:
        """The nodes of a captured graph."""
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not tensor_leaves(value):
                continue
            args, kwargs = pytree.tree_map_only(fx.Node, lambda each: each.meta.get("val"), (node.args, node.kwargs))
            if is_call(node):
                self._call(call_of(node).effects.ways, tensor_leaves(args[1]), tensor_leaves(value))
            elif is_write(node.target):
                self._call([_written(node.target, args)], tensor_leaves(args), tensor_leaves(value))
            elif node.target is operator.getitem and isinstance(args[0], list | tuple):
                self._orders[id(value)] = self._order(args[0][args[1]])
            else:
                self._operation(Listed(node.target, args, kwargs, value))

    def _order(self, tensor: torch.Tensor) -> RowOrder:
        found = self._orders.get(id(tensor))
        if found is None:
            found = self._orders[id(tensor)] = plain_order(tensor, self._sizes)
        return found

    def _call(self, ways: Sequence[Way], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """What runs operations of its own; of no known way where nobody knows these."""
        found = [self._results(way, given) for way in ways]
        if not found:
            self._operation(Listed(None, given, {}, made))
        for n, each in enumerate(made if found else ()):
            self._orders[id(each)] = _any_of(plain_order(each, self._sizes), [results[n] for results in found])

    def _results(self, way: Way, given: Sequence[torch.Tensor]) -> list[RowOrder]:
        self._orders.update((id(inner), self._order(each)) for inner, each in zip(way.given, given, strict=True))
        for each in way.given:
            self._share(each)
        for operation in way.operations:
            self._operation(operation)
        return [*map(self._order, way.made)]

    def _operation(self, operation: Listed) -> None:
        target, args, kwargs, made = operation
        given = [(each, self._order(each)) for each in tensor_leaves((args, kwargs))]
        step = RowStep(target, args, {**kwargs}, given, tensor_leaves(made), self._sizes)
        written = written_tensors(target, args, kwargs)
        for index, each in enumerate(step.made):
            self._orders[id(each)] = order_of(step, index)
            self._share(each)
        for each in written:
            self._write(each)

    def _share(self, tensor: torch.Tensor) -> None:
        self._sharing[storage_of(tensor)].append(tensor)

    def _write(self, tensor: torch.Tensor) -> None:
        """Into one of several tensors in one memory: the others have it, too."""
        order = self._order(tensor)
        for each in self._sharing[storage_of(tensor)]:
            if each is not tensor:
                old = self._order(each)
                known = old.known and (not old.alike or old.several <= 1 or self._interleaves(tensor, each))
                numbers = bool(self._sizes.dimensions(each.shape)) and (old.numbers or order.numbers)
                self._orders[id(each)] = replace(old, alike=False, known=known, numbers=numbers)

    def _interleaves(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether a view has every so manieth entry of each row."""
        steps = [
            [self._sizes.many(each.stride(dim)) * (self._sizes.several(each.shape[dim]) or 0.0) for dim in dims]
            for each in (part, whole)
            if len(dims := self._sizes.dimensions(each.shape)) == 1
        ]
        return len(steps) == 2 and steps[0] == steps[1]


def _written(target: Callable[..., Any], args: Sequence[Any]) -> Way:
    """What a function runs that stands in the graph for an operation that writes."""
    given, listed = tensor_leaves(args), ListedWrites()
    with detect_fake_mode(given) or contextlib.nullcontext(), torch.no_grad(), listed:
        made = target(*args)
    return Way(listed.operations, given, tensor_leaves(made), {})


def _any_of(plain: RowOrder, ways: Sequence[RowOrder]) -> RowOrder:
    """What is known of a result, whichever way a call goes."""
    same = len({each.blocks for each in ways}) == 1
    return RowOrder(
        ways[0].blocks if same else plain.blocks, same and all(each.known for each in ways),
        all(each.alike for each in ways), any(each.numbers for each in ways),
    )  # fmt: skip
