"""Which values between partitions bear a gradient.

A value that may have one has one: its readers send a gradient back, and its maker goes on from there if it needs to.
Where a reader asks for it, as a reentrant checkpoint does, it has one exactly if it had one in the capture:

    h = self.frozen(x).requires_grad_()     has one, though nothing is trained behind it
    h = self.trained(x).detach()            has none, though the partition is trained

What leads to such a value counts likewise. Each forward is checked: later ones must not decide otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.export.graph_signature import InputKind

from assigner.errors import UsageError
from assigner.model.marking.families import opaque_arguments
from assigner.model.marking.nodes import is_item
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import fx

    from assigner.model.marking.capture import Capture
    from assigner.model.marking.glue import Ownership
    from assigner.model.marking.graph import Piece, Value, ValueShape


def requiring(captured: Capture, ownership: Ownership, tensors: Mapping[str, torch.Tensor]) -> set[fx.Node]:
    """The nodes whose values require a gradient, or may.

    Args:
        captured: The forward.
        ownership: Of its nodes.
        tensors: The model's, by name.
    """
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
            requires = node.target is wanted or any(each in found for each in node.all_input_nodes)
        if requires:
            found.add(node)
    return found


def asked(captured: Capture, ownership: Ownership, reads: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, bool]:
    """The values between partitions that must require a gradient as in the capture.

    Args:
        captured: The forward.
        ownership: Of its nodes.
        reads: What each partition reads of others.

    Returns:
        They, each with whether its reader itself asks.
    """
    asking = {
        ownership.owner[node]
        for node in ownership.nodes
        if is_call(node) and captured.calls[opaque_arguments(node)[0]].effects.asks
    }
    found: dict[fx.Node, bool] = {}
    for place in reversed(range(len(reads))):
        if place in asking or any(ownership.owner[each] == place for each in found):
            found.update({each: place in asking or found.get(each, False) for each in reads[place]})
    return found


def as_captured(partition: str, *, requires: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What looks at a value that leaves a partition: whether it requires a gradient was decided in the capture."""

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad != requires:
            raise UsageError(
                f"a result of partition {partition!r} {'has no' if requires else 'has a'} gradient now, and"
                f" {'had one' if requires else 'had none'} in the forward that the model was cut by: what a reentrant"
                " checkpoint behind it does depends on that",
                hint="checkpoint with use_reentrant=False; or detach, freeze and require gradients alike in each step",
            )
        return tensor

    check.__name__ = check.__qualname__ = f"check_{'with' if requires else 'without'}_gradient"
    return check


def with_gradients(
    values: Mapping[Value, ValueShape],
    pieces: Sequence[Piece],
    tensors: Mapping[str, torch.Tensor],
    requires: Collection[Value],
    exactly: Collection[Value],
) -> dict[Value, ValueShape]:
    """A value bears a gradient if it is a float and a trainable parameter lies behind it.

    Args:
        values: All.
        pieces: Who makes and reads them.
        tensors: The model's, by name.
        requires: Those that required one in the capture, or may have.
        exactly: Those that must be as they were there.
    """
    trained = {value.partition for value in requires}
    for piece in pieces:
        own = any(tensors[name].requires_grad for name in piece.parameters)
        fed = any(value.partition in trained and values[value].gradient for value in piece.reads)
        if own or fed:
            trained.add(piece.name)
    bearing = {value for value in values if (value in requires if value in exactly else value.partition in trained)}
    return {value: replace(shape, gradient=shape.gradient and value in bearing) for value, shape in values.items()}
