"""Regions under torch.no_grad(): export keeps each as a graph of its own; here they join the graph around them.

Their nodes bear a note, `without_gradient`, and are given their meaning by `assigner.model.marking.functional`. Marked
modules called within are then calls like any other. So do regions that switch off an autocast which nobody has switched
on. Regions of another kind (autocast, conditions) stay whole and cannot be cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from assigner.errors import MarkingError
from assigner.model.marking.nodes import check_unwrapped, line_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def without_regions(module: fx.GraphModule, *, autocast: bool) -> fx.Graph:
    """The graph of an exported module, changed in place, with its regions as ordinary nodes.

    Args:
        module: The exported one.
        autocast: It runs under autocast.

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
                check_unwrapped(node)
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
