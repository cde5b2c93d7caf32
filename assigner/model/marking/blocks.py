"""Which values have the rows of a micro-batch in several blocks, so that joined ones would have another order.

    cat((a, b))                 a1 a2 b1 b2: of two micro-batches a1 b1 a2 b2, where the model has a1 a2 b1 b2
    x.transpose(0, 1).flatten(0, 1)      likewise, of (rows, steps) as steps x rows
    x.flatten(0, 1), x.repeat_interleave(2, 0)      what is of one row lies together: joined as in the model

What a module does that runs as one call is not known: what it makes of values in blocks is in blocks, if it has as many
for each row, and else what it makes lies row by row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.model.marking.cutter import Symbols

_ROWS = 8
"""So many rows are put in for the symbols."""

_RESHAPING = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}


def in_blocks(graph: fx.Graph, outputs: Iterable[Any], symbols: Symbols) -> set[fx.Node]:
    """The nodes of a captured graph whose values have a multiple of the rows, in an order other than row by row.

    Args:
        graph: The graph.
        outputs: The leaves of what it returns; where none has more than its rows, the graph is not gone through.
        symbols: Its sizes.
    """
    found = set[fx.Node]()
    if not any((_multiple(each, symbols) or 0.0) > 1 for each in outputs if isinstance(each, fx.Node)):
        return found
    for node in graph.nodes:
        of_inputs = [each for each in node.all_input_nodes if each in found]
        several = _multiple(node, symbols)
        if several is None:
            if of_inputs:  # a call with several results
                found.add(node)
        elif several > 1 and (of_inputs or _puts_in_blocks(node, several, symbols)):
            found.add(node)
    return found


def _multiple(node: fx.Node, symbols: Symbols) -> float | None:
    """How many entries for each row a value has along its rows, 0 where it has none; None: it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    dim = symbols.rows_dimension(value.shape)
    return 0.0 if dim is None else symbols.number(value.shape[dim], _ROWS) / _ROWS


def _puts_in_blocks(node: fx.Node, several: float, symbols: Symbols) -> bool:
    """Whether an operation has more for each row than what it is given, and these not side by side."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    given = [(each, _multiple(each, symbols) or 0.0) for each in node.all_input_nodes]
    name = node.target.overloadpacket.__name__
    if several <= max((each for _, each in given), default=several) or name == "repeat_interleave":
        return False
    return name not in _RESHAPING or _before(node, symbols) != _before(given[0][0], symbols)


def _before(node: fx.Node, symbols: Symbols) -> int | None:
    """How many times a value runs through its rows: the product of the dimensions in front of them."""
    shape: Any = node.meta["val"].shape
    dim = symbols.rows_dimension(shape)
    return None if dim is None else math.prod(symbols.number(size, _ROWS) for size in shape[:dim])
