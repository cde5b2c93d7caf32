"""What a node of a captured graph says: its line, its memory, its call, what its value depends on and writes to."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.mutation import is_random, named_arguments, storage_of, tensor_leaves, written_names
from assigner.model.marking.interception import is_hook
from assigner.model.marking.opaque import is_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from assigner.model.marking.opaque import OpaqueCall


def is_item(node: fx.Node) -> bool:
    """True if a node takes one item of another's result."""
    return node.op == "call_function" and node.target is operator.getitem


def is_result(node: fx.Node) -> bool:
    """True if a node takes one of an opaque call's results."""
    return is_item(node) and is_call(cast("fx.Node", node.args[0]))


def line_of(node: fx.Node) -> str:
    """The line of the model that a node comes from."""
    trace = (node.stack_trace or "").strip().splitlines()
    return trace[-1].strip() if trace else "unknown line"


def storages(node: fx.Node) -> tuple[int, ...]:
    """The memories, by the addresses of fake storages, that the tensors in a node's value lie in.

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
    return tuple(dict.fromkeys(storage_of(leaf) for leaf in leaves if leaf.layout is torch.strided))


def reached(nodes: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Some nodes, and all that these lead to."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += further(each)
    return found


def made_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes, and all that their values depend on."""
    return reached(nodes, lambda each: each.all_input_nodes)


def shape_alone(node: fx.Node) -> bool:
    """True if an exported node's value follows from the shapes of the inputs: no parameter, value or draw is in it."""
    size = torch.ops.aten.sym_size.int  # which says nothing of the values behind it
    found = reached([node], lambda each: () if each.target is size else each.all_input_nodes)
    return not any(each.op == "placeholder" or is_call(each) or is_random(each.target) for each in found)


STATE = (InputKind.PARAMETER, InputKind.BUFFER)


def note_calls(
    graph: fx.Graph, calls: Sequence[OpaqueCall], hooks: Mapping[int, Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Have the nodes of an export that are an opaque call, or do something to a tensor, say what by `meta`, too.

    In the graph they have its number. A hook that was removed again is None.
    """
    for node in graph.nodes:
        if is_call(node):
            node.meta["call"] = calls[cast("int", node.args[0])]
        elif is_hook(node):
            node.meta["hook"] = hooks.get(cast("int", node.args[0]))


def call_of(node: fx.Node) -> OpaqueCall:
    """The opaque call that a node is."""
    return cast("OpaqueCall", node.meta["call"])


def given_to(node: fx.Node) -> list[fx.Node]:
    """The tensors that an opaque call is given."""
    return cast("list[fx.Node]", node.args[1])


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    if node.op != "call_function":
        return []
    if is_call(node):
        return [given_to(node)[n] for n in sorted(call_of(node).effects.written)]
    if is_hook(node):
        return []
    names = written_names(node.target, node.args, node.kwargs)
    if not names:
        return []
    named = named_arguments(node.target, node.args, node.kwargs)
    return [leaf for name in names for leaf in pytree.tree_leaves(named[name]) if isinstance(leaf, fx.Node)]


def without_regions(module: fx.GraphModule, *, autocast: bool) -> fx.Graph:
    """The graph of an exported module, changed in place, with its regions as ordinary nodes.

    Export keeps each region under torch.no_grad() as a graph of its own. Its nodes join the graph around them with a
    note, `without_gradient`, to which `Functional` gives its meaning: marked modules called within are then calls like
    any other. So do regions that switch off an autocast which nobody has switched on.

    Raises:
        MarkingError: a region that is more than torch.no_grad() or torch.enable_grad(), and changes something.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if isinstance(node.target, HigherOrderOperator):
            args = cast("tuple[Any, ...]", node.args)
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                enabled, inner, *given = args
                note = {"without_gradient": not enabled}
            elif node.target is torch.ops.higher_order.wrap_with_autocast and not (args[2] or autocast):
                inner, *given = args[4:]
                note = {}
            else:
                storages(node)  # which says so of torch.vmap
                casts = node.target is torch.ops.higher_order.wrap_with_autocast
                whole = (
                    "; a forward that is all under torch.autocast: Workload(autocast=...) in its place" if casts else ""
                )
                raise MarkingError(
                    f"the forward has a region ({node.target.__name__}) that cannot be cut ({line_of(node)})",
                    hint=f"mark a larger module that contains it (torch.autocast, a condition, a loop){whole}",
                )
            body = without_regions(getattr(module, str(inner.target)), autocast=autocast)
            _inline(graph, node, body, given, note)
    for node in list(graph.nodes):
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            graph.erase_node(node)
    return graph


def _inline(graph: fx.Graph, region: fx.Node, body: fx.Graph, given: Sequence[Any], note: Mapping[str, Any]) -> None:
    """Copy a region's nodes, with a note, in front of the node that calls it, and drop that node."""
    copies: dict[fx.Node, Any] = {}
    waiting = iter(given)
    results: tuple[Any, ...] = ()
    with graph.inserting_before(region):
        for node in body.nodes:
            if node.op == "placeholder":
                copies[node] = next(waiting)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {**note, **copies[node].meta}
        for item in list(region.users):
            item.replace_all_uses_with(results[cast("int", item.args[1])])
            graph.erase_node(item)
    graph.erase_node(region)
