"""Gradients that a loss takes by itself, of one of the model's outputs by another: by what a rank cannot see of it.

    model returns (y, x); loss takes grad(y, x)       x: coordinates, features, a point between two samples

The last partition is a graph of its own. It has the way from x to y where x comes in by itself, and what else comes in
was not made of x; else some of it lies in other partitions, and the sum would lack that part.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.model.marking import PartitionGraph

_UNUSED = "appears to not have been used in the graph"


def reads_what_is_made_of_another(graph: PartitionGraph) -> bool:
    """Whether the last partition reads a value, and another one that may have been made of it."""
    before: dict[str, set[str]] = {"": set()}
    for piece in graph.pieces:
        sources = {value.partition for value in piece.reads}
        before[piece.name] = sources.union(*(before[each] for each in sources))
    reads = set(graph.last.reads)
    return any(
        one.partition == other.partition or one.partition in before[other.partition]
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
        asked = [n for n, each in enumerate(inputs) if any(each is tensor for tensor in tensors)]
        if is_split and any(inputs[n].is_leaf for n in asked):
            raise _refused()
        try:
            made = original(outputs, *arguments, **words)
        except RuntimeError as error:
            if asked and _UNUSED in str(error):
                raise _refused() from error
            raise
        if made is not None and any(made[n] is None for n in asked):
            raise _refused()
        return made

    with mock.patch.object(autograd, "_engine_run_backward", run_backward):
        yield


def _refused() -> UsageError:
    return UsageError(
        "Workload.loss takes the gradient of an output by another output, and what lies between them is in other"
        " partitions: that part of the gradient would be missing",
        hint="have a marked module that contains both compute the gradient (torch.autograd.grad) and return it",
    )
