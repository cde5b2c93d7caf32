"""What each partition holds, by the names that its modules and lone tensors have in the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.holding import Holding

if TYPE_CHECKING:
    from assigner.marking.graph import PartitionGraph


def held_names(graph: PartitionGraph) -> dict[str, Holding]:
    """What each partition holds; what no partition uses stands under the name "".

    Together they cover the model's state_dict.
    """
    held: dict[str, Holding] = {}
    for piece in graph.pieces:
        called = [str(node.target) for node in piece.graph.nodes if node.op == "call_module"]
        read = [str(node.target) for node in piece.graph.nodes if node.op == "get_attr"]
        lone = dict.fromkeys(name for name in read if name not in piece.constants)
        held[piece.name] = Holding(tuple(dict.fromkeys(called)), tuple(lone))
    modules = {name for each in held.values() for name in each.modules}
    tensors = {name for each in held.values() for name in each.tensors}
    unused = [
        name
        for name in graph.deferred.model.state_dict()
        if name not in tensors and not any(name.startswith(f"{module}.") for module in modules)
    ]
    return {**held, "": Holding((), tuple(unused))}
