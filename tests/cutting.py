"""Cut a model and run its pieces one after another, to compare with the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from workloads import WIDTH, graph_of, numbers, workload

from assigner.model.marking import PartitionGraph, Value, partition_graph
from assigner.model.workload import Workload, call_arguments


def outputs(graph: PartitionGraph, inputs: Any) -> Any:
    """The model's output from its pieces, run one after another, each reading what its `reads` say."""
    leaves = pytree.tree_leaves(call_arguments(inputs))
    modules = graph.build([piece.name for piece in graph.pieces])
    values: dict[Value, torch.Tensor] = {Value("", n): leaf for n, leaf in enumerate(leaves)}
    made: tuple[torch.Tensor, ...] = ()
    for piece in graph.pieces:
        reads = [values[value].clone() for value in piece.reads]
        torch.manual_seed(0)
        made = modules[piece.name](*reads, *(size.evaluate(leaves) for size in piece.sizes))
        if piece is not graph.last:
            for n, each in enumerate(made):
                shape = graph.values[Value(piece.name, n)]
                assert shape.sizes(leaves) in (None, tuple(each.shape))
                assert shape.dtype == each.dtype
                values[Value(piece.name, n)] = each.clone()
    return graph.rebuild_output(made)


def check(made: Workload, *marks: str) -> PartitionGraph:
    """Cut, run for another number of rows, and compare with the plain model."""
    graph = partition_graph(made, marks) if marks else graph_of(made)
    inputs, _ = made.make_batch(3, 1)
    torch.manual_seed(made.seed)
    model = made.model()
    args, kwargs = call_arguments(pytree.tree_map_only(torch.Tensor, torch.clone, inputs))
    expected, found = model(*args, **kwargs), outputs(graph, inputs)
    one, other = pytree.tree_flatten(expected), pytree.tree_flatten(found)
    assert one[1] == other[1]
    for left, right in zip(one[0], other[0], strict=True):
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(right, left, rtol=0, atol=1e-12)
        else:
            assert left == right
    return graph


def edges(graph: PartitionGraph) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in graph.edges}


def of(forward: Any, *marks: str, batch: Any = numbers, **modules: Any) -> Workload:
    """A workload around a forward, with modules named by keyword: nn.Linear(WIDTH, WIDTH) for None."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("a", "b", "c"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
            for name, make in modules.items():
                setattr(self, name, make())

    Model.forward = forward
    return workload(Model, *(marks or ("a", "b", "c")), batch=batch)
