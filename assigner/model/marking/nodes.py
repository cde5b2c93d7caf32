"""What a node of a captured graph says: its line, its memory, what its value depends on."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from assigner.errors import MarkingError
from assigner.model.deferred.mutation import is_random, storage_of, tensor_leaves
from assigner.model.marking.opaque import is_call

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_item(node: fx.Node) -> bool:
    """True if a node takes one item of another's result."""
    return node.op == "call_function" and node.target is operator.getitem


def line_of(node: fx.Node) -> str:
    """The line of the model that a node comes from."""
    trace = (node.stack_trace or "").strip().splitlines()
    return trace[-1].strip() if trace else "unknown line"


def storages(node: fx.Node) -> tuple[int, ...]:
    """The memories, by the addresses of fake storages, that the tensors in a node's value lie in.

    Raises:
        MarkingError: torch.func or torch.vmap has wrapped them.
    """
    leaves = check_unwrapped(node)
    return tuple(dict.fromkeys(storage_of(leaf) for leaf in leaves if leaf.layout is torch.strided))


def check_unwrapped(node: fx.Node) -> list[torch.Tensor]:
    """The tensors in a node's value.

    Raises:
        MarkingError: torch.func or torch.vmap has wrapped them.
    """
    leaves = tensor_leaves(node.meta.get("val"))
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, leaves)):
        raise MarkingError(
            f"the forward uses torch.func or torch.vmap between partitions ({line_of(node)})",
            hint="write it with operations over the whole batch: no capture follows torch.func, not even in"
            " a partition",
        )
    return leaves


def shape_alone(node: fx.Node) -> bool:
    """True if an exported node's value follows from the shapes of the inputs: no parameter, value or draw is in it."""
    found, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        if each.op == "placeholder" or is_call(each) or is_random(each.target):
            return False
        if each.target is not torch.ops.aten.sym_size.int:  # a size says nothing of the values behind it
            waiting += [one for one in each.all_input_nodes if one not in found]
            found.update(each.all_input_nodes)
    return True


def brings_data(node: fx.Node, kinds: Mapping[str, tuple[InputKind, str]]) -> bool:
    """True if a node's value comes from the batch, from a partition or from a generator."""
    if node.op == "placeholder":
        return kinds[node.name][0] is InputKind.USER_INPUT
    return is_call(node) or is_random(node.target)


def behind(node: fx.Node) -> set[fx.Node]:
    """All nodes that a node's value depends on."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return found
