"""Nodes of torch's autograd graphs: who made them, in which order, and what is hooked on to them."""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import Node

_LEAF = "torch::autograd::AccumulateGrad"


def is_leaf(node: Node) -> bool:
    """Whether gradients land there."""
    return node.name() == _LEAF


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where a backward starts that has the gradient of this tensor, which needs one.

    The node of a Function that is written in Python may not own its graph; an edge that torch makes of it does.
    """
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def hooks_so_far() -> int:
    """How many hooks this process has registered: a forward that raises it has hooked on to its tensors."""
    return RemovableHandle.next_id


def code_so_far() -> int:
    """How often a forward has left code in its graph that runs in the backward, and is no hook.

    That is the backward of a Function in Python, or what unpacks the values that a graph has saved, as a checkpoint.
    """
    return _code[0]


_code = [0]


@cache
def count_code() -> None:
    """Have such code count from now on; see `code_so_far`.

    torch makes an object of a class of its own for each call of a Function, whichever way `apply` was found.
    """
    plain = saved_tensors_hooks.__enter__

    @wraps(plain)
    def enter(self: saved_tensors_hooks) -> None:
        _code[0] += 1
        plain(self)

    def init(_: BackwardCFunction) -> None:
        _code[0] += 1

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    BackwardCFunction.__init__ = init  # type: ignore[method-assign, assignment]


@cache
def count_retained() -> None:
    """Have `retain_grad` count as a hook from now on, which it is in torch's engine: it would add a gradient twice."""
    plain = torch.Tensor.retain_grad

    @wraps(plain)
    def retain_grad(self: torch.Tensor) -> None:
        RemovableHandle.next_id += 1
        plain(self)

    torch.Tensor.retain_grad = retain_grad  # type: ignore[method-assign, assignment]


def nodes_so_far() -> int:
    """How many nodes this thread has made."""
    return torch._C._autograd._get_sequence_nr()


def are_made_here(roots: Sequence[GradientEdge | None], numbers: range) -> bool:
    """Whether all nodes of a graph but its leaves were made by this thread, as the nodes of these numbers."""
    seen: set[Node] = set()
    waiting = [root.node for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or is_leaf(node):
            continue
        if node._sequence_nr() not in numbers:
            return False
        seen.add(node)
        waiting += [each for each, _ in node.next_functions if each is not None]
    return True
