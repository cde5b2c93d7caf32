"""Gradients that a loss takes by itself, of one of the model's outputs by another: by what a rank cannot see of it.

    model returns (y, x); loss takes grad(y, x)       x: coordinates, features, a point between two samples

The last partition is a graph of its own. It has the way from x to y where it has made x of its own weights, or where x
comes in and nothing else that comes in was made of x; else some of it lies in other partitions, and the sum would lack
that part.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.model.marking import PartitionGraph, Value

_UNUSED = "appears to not have been used in the graph"


def reads_what_is_made_of_another(graph: PartitionGraph) -> bool:
    """Whether the last partition reads a value, and another one that may have been made of it."""
    origins: dict[str, set[Value]] = {"": set()}
    for piece in graph.pieces:
        origins[piece.name] = set(piece.reads).union(*(origins[value.partition] for value in piece.reads))
    reads = set(graph.last.reads)
    return any(
        one in origins[other.partition] or (one.partition != "" and one.partition == other.partition)
        for one in reads
        for other in reads - {one}
    )


@contextlib.contextmanager
def whole_gradients(output: Any, *, is_split: bool) -> Iterator[None]:
    """Refuse gradients by an output that lack a part, taken while the block runs.

    Args:
        output: What the model returned, in its structure.
        is_split: Of an output that other partitions have made, some of what is made of it lies there, too.

    Raises:
        UsageError: such a gradient is asked for.
    """
    tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    if len(tensors) < 2:
        yield
        return
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward

    def run_backward(outputs: Any, *arguments: Any, **words: Any) -> Any:
        inputs = arguments[3] if len(arguments) > 3 else ()
        asked = [
            n for n, each in enumerate(inputs)
            if any(each is tensor for tensor in tensors) and not _is_of_own_weights(each)
        ]  # fmt: skip
        if is_split and (asked or words.get("accumulate_grad")):
            raise _refused()
        try:
            made = original(outputs, *arguments, **words)
        except RuntimeError as error:
            if asked and _UNUSED in str(error):
                raise _refused() from error
            raise
        if made is not None and any(made[n] is None and _is_handed_on(inputs[n]) for n in asked):
            raise _refused()
        return made

    with mock.patch.object(autograd, "_engine_run_backward", run_backward):
        yield


def _is_of_own_weights(tensor: torch.Tensor) -> bool:
    """Whether a parameter is in its graph: the last partition has made it, and no other has it, too."""
    if isinstance(tensor, nn.Parameter):
        return True
    seen, ahead = set[Any](), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
    return False


def _is_handed_on(tensor: torch.Tensor) -> bool:
    """Whether it came in as it is: the loss has a leaf in its place, or a copy."""
    return tensor.is_leaf or (tensor.grad_fn is not None and tensor.grad_fn.name() == "CloneBackward0")


def _refused() -> UsageError:
    return UsageError(
        "Workload.loss takes the gradient of an output by another output, and what lies between them is in other"
        " partitions: that part of the gradient would be missing",
        hint="have a marked module that contains both compute the gradient (torch.autograd.grad) and return it",
    )
