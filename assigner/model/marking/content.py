"""What each partition holds, by the names that its modules and lone tensors have in the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from assigner.formats.partitioncontent import PartitionContent

if TYPE_CHECKING:
    from torch import fx

    from assigner.model.marking.graph import PartitionGraph, Piece


def model_content(graph: PartitionGraph) -> dict[str, PartitionContent]:
    """What each partition holds; what no partition uses stands under the name "".

    Together they cover the model's state_dict.
    """
    held: dict[str, PartitionContent] = {}
    for piece in graph.pieces:
        read = [str(node.target) for node in piece.graph.nodes if node.op == "get_attr"]
        lone = dict.fromkeys(name for name in read if name not in piece.constants)
        held[piece.name] = PartitionContent(piece.called, tuple(lone), _meetings(piece))
    modules = {name for each in held.values() for name in each.modules}
    tensors = {name for each in held.values() for name in each.tensors}
    unused = [
        name
        for name in graph.deferred.model.state_dict()
        if name not in tensors and not any(name.startswith(f"{module}.") for module in modules)
    ]
    return {**held, "": PartitionContent((), tuple(unused))}


def _meetings(piece: Piece) -> tuple[frozenset[str], ...]:
    """Partitions whose tensors one operation between modules takes, each such group once."""
    inputs = (node for node in piece.graph.nodes if node.op == "placeholder")
    origin: dict[fx.Node, frozenset[str]] = {
        node: frozenset((value.partition,)) for node, value in zip(inputs, piece.reads, strict=False)
    }
    found: dict[frozenset[str], None] = {}
    for node in piece.graph.nodes:
        if node.op == "call_module":
            origin[node] = frozenset((piece.name,))
        elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            origin[node] = frozenset().union(*(origin.get(each, ()) for each in node.all_input_nodes))
            if len(origin[node]) > 1:
                found[origin[node]] = None
    return tuple(found)
