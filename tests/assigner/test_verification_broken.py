"""The check of a cut model whose capture is wrong: what it finds, and where it says that it begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kept import kept
from torch import nn
from workloads import WIDTH, graph_of, numbers, workload

from assigner.errors import MarkingError
from assigner.model.marking import partition_graph
from assigner.runtime.step.executor import Executor
from assigner.verification.checking import check_model


def mutated(graph, name, change):
    """The graph with one partition's forward changed by `change(fx graph)`."""
    piece = graph.piece[name]
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(piece.graph, {}))
    change(copy)
    pieces = tuple(replace(piece, graph=copy) if each is piece else each for each in graph.pieces)
    return replace(graph, pieces=pieces, recuts={True: [], False: []})


class Glued(nn.Module):
    """Three linear layers with code between them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for part in self.parts:
            x = torch.relu(part(x)) * 1.5
        return self.last(x)


def drop(graph):
    node = next(node for node in graph.nodes if "relu" in str(node.target))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def detach(graph):
    node = next(node for node in graph.nodes if "relu" in str(node.target))
    node.target = torch.ops.aten.relu.default
    with graph.inserting_before(node):
        node.args = (graph.call_function(torch.ops.aten.detach.default, (node.args[0],)),)


def other_constant(graph):
    node = next(node for node in graph.nodes if "mul" in str(node.target))
    node.args = (node.args[0], 1.5 + 3e-5)


@kept
def glued(dtype):
    def batch(rows, generator):
        return tuple(each.to(dtype) for each in numbers(rows, generator))

    return replace(workload(Glued, "parts.*", "last"), model=lambda: Glued().to(dtype), batch=batch)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_capture_that_is_not_broken_passes(dtype):
    """What the next test breaks is equal as it is."""
    assert check_model(glued(dtype), graph_of(glued(dtype))).result == "equal"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "change", "said"),
    [
        ("parts.0", drop, "it begins in partition 'parts.0' or 'parts.1', before 'parts.1' is called"),
        pytest.param(
            "parts.2", drop, "it begins in partition 'parts.2', before 'last' is called", marks=pytest.mark.sweep
        ),
        ("parts.1", other_constant, "it begins in partition 'parts.1' or 'parts.2', before 'parts.2' is called"),
        ("parts.1", detach, "it begins in the backward of partition 'parts.1'"),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.sweep), torch.float32])
def test_a_broken_capture_is_found_where_it_is_broken(partition, change, said, dtype):
    """A lost operation, a constant that is off by 3e-5, a gradient that goes no further."""
    with pytest.raises(MarkingError, match=said):
        check_model(glued(dtype), mutated(graph_of(glued(dtype)), partition, change))


def test_a_broken_forward_is_found_without_room(monkeypatch):
    """The code between modules runs on both sides."""
    monkeypatch.setattr("assigner.verification.checking.free_memory", lambda: 0)
    made = workload(Glued, "parts.*", "last")
    with pytest.raises(MarkingError, match=r"the model's output .* differs by"):
        check_model(made, mutated(partition_graph(made), "parts.1", other_constant))


@pytest.mark.long
def test_a_number_within_a_graph_in_the_place_of_the_batch_s_is_found(monkeypatch):
    """Three rows run through another graph than two and two: its second micro-batch is the batch's third."""

    class Branching(Glued):
        def forward(self, x):
            x = x * 2 if x.shape[0] > 2 else x - 1
            return super().forward(x)

    def of_another(self, action, island):
        gradients = self.loss.gradients
        with monkeypatch.context() as patched:
            patched.setattr(self.loss, "gradients", lambda _: gradients(action.micro_batch))
            plain(self, action, island)

    plain = Executor._backward
    made = workload(Branching, "parts.*", "last")
    assert check_model(made, graph_of(made)).result == "equal"
    monkeypatch.setattr(Executor, "_backward", of_another)
    with pytest.raises(MarkingError, match=r"it fails in backward of partition 'last', micro-batch 1"):
        check_model(made, graph_of(made))
