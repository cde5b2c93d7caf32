"""Which values between partitions bear a gradient.

A value that may have one has one: its readers send a gradient back, and its maker goes on from there if it needs to.
Where code behind it looks, as a reentrant checkpoint does, it has one exactly if it had one in the capture:

    h = self.frozen(x).requires_grad_()     has one, though nothing is trained behind it
    h = self.trained(x).detach()            has none, though the partition is trained

What leads to such a value counts likewise. Readers on the maker's rank find it as this forward has left it, so that a
loop may freeze what lies in front. A message says nothing of that, and neither does a graph between partitions that
was captured once: there, what later forwards decide otherwise is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.export.graph_signature import InputKind

from assigner.model.marking.nodes import is_item, opaque_arguments
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import decided_otherwise, still_required, wanted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from assigner.model.marking.cutter import Cutter
    from assigner.model.marking.graph import Piece, Value, ValueShape


def _requiring(cutter: Cutter) -> set[fx.Node]:
    """The nodes whose values require a gradient, or may; without training, those that a forward has asked one for."""
    captured, ownership, tensors = cutter.captured, cutter.ownership, cutter.deferred.tensors()
    found: set[fx.Node] = set()
    for node in ownership.nodes:
        if node.op == "placeholder":
            kind, name = ownership.placeholders[node]
            requires = kind is InputKind.PARAMETER and tensors[name].requires_grad
        elif is_item(node) and is_call(node.args[0]):
            number, *_ = opaque_arguments(node.args[0])
            requires = node.args[1] in captured.calls[number].effects.wanting
        elif node.target is torch.ops.aten.detach.default or is_call(node):
            requires = False
        else:
            requires = node.target is wanted or (
                cutter.training and any(each in found for each in node.all_input_nodes)
            )
        if requires:
            found.add(node)
    return found


def _asked(cutter: Cutter) -> set[fx.Node]:
    """The values between partitions of which code behind them looks whether they require a gradient."""
    captured, ownership, reads = cutter.captured, cutter.ownership, cutter.reads
    asking = {
        ownership.owner[node]
        for node in ownership.nodes
        if node.target is still_required or (is_call(node) and captured.calls[opaque_arguments(node)[0]].effects.asks)
    }
    found: set[fx.Node] = set()
    for place in reversed(range(len(reads))):
        if place in asking or any(ownership.owner[each] == place for each in found):
            found.update(reads[place])
    return found


def check_asked(partition: str, made: torch.Tensor, *, gradient: bool, sent: bool) -> None:
    """Look at a value that code behind it looks at (`ValueShape.asked`).

    Args:
        partition: Which made it.
        made: The value.
        gradient: One comes back for it.
        sent: Another rank reads it too, and takes that for an answer.

    Raises:
        UsageError: it requires a gradient and none comes back, or it requires none and another rank does not know.
    """
    if made.requires_grad != gradient and (sent or not gradient):
        raise decided_otherwise(f"a result of partition {partition!r}", requires=gradient)


def with_gradients(
    cutter: Cutter, values: Mapping[Value, ValueShape], pieces: Sequence[Piece]
) -> dict[Value, ValueShape]:
    """A value bears a gradient if it is a float and a trainable parameter lies behind it.

    Without training no parameter has a value require one: those that required one in the capture bear it.
    """
    tensors = cutter.deferred.tensors()
    requires, asked = ({cutter.crossing[node] for node in nodes if node in cutter.crossing}
                       for nodes in (_requiring(cutter), _asked(cutter)))  # fmt: skip
    exactly = asked if cutter.training else values
    trained = {value.partition for value in requires}
    for piece in pieces:
        own = any(tensors[name].requires_grad for name in piece.parameters)
        fed = any(value.partition in trained and values[value].gradient for value in piece.reads)
        if own or fed:
            trained.add(piece.name)
    bearing = {value for value in values if (value in requires if value in exactly else value.partition in trained)}
    return {
        value: replace(shape, gradient=shape.gradient and value in bearing, asked=shape.gradient and value in asked)
        for value, shape in values.items()
    }
