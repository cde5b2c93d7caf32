"""Cutting a model's own forward: the pieces together compute what the model computes, and the edges are right."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cutting import check, edges, of
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from workloads import WIDTH, graph_of, language, pairs, skips, tokens, towers, workload

from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition, partition_graph
from assigner.model.marking.gradients import check_asked
from assigner.model.marking.graph import Value
from assigner.runtime.plangraph import plan_graph

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_language_model():
    """Blocks are joined by one edge each; the mask, made from shapes, is run again instead of sent."""
    graph = check(language())
    names = ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [piece.name for piece in graph.pieces] == names
    assert edges(graph) == set(itertools.pairwise(names))
    assert {(edge.bytes_per_sample, edge.fixed_bytes) for edge in graph.edges} == {(5 * WIDTH * 8, 0)}
    assert [(tie.parameter, tie.partitions) for tie in graph.ties] == [("tokens.weight", ("tokens", "head"))]
    assert "positions" in graph.piece["tokens"].parameters
    assert "norm.weight" in graph.piece["blocks.2"].parameters + graph.piece["head"].parameters
    assert graph.canonical["head.weight"] == "tokens.weight"


def test_equal_blocks_are_of_one_kind():
    """Blocks with the same structure and shapes share their kind; others do not, nor where no gradient goes back."""
    graph = graph_of(language())
    assert graph.piece["blocks.0"].kind == graph.piece["blocks.1"].kind
    assert len({graph.piece[name].kind for name in ("tokens", "blocks.0", "head")}) == 3
    plain = partition_graph(workload(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])))
    first, second, third, last = (piece.kind for piece in plain.pieces)
    assert second == third
    assert len({first, second, last}) == 3


def test_skips_and_branches():
    """Values that skip partitions and branches are edges."""
    assert edges(check(skips())) == {
        ("parts.0", "parts.1"), ("parts.0", "last"), ("parts.1", "parts.2"), ("parts.2", "last"),
    }  # fmt: skip
    graph = check(towers())
    assert edges(graph) == {("left", "join"), ("right", "join")}
    assert graph.piece["right"].reads[0].partition == ""


def test_a_value_with_several_readers():
    """One output that two partitions read is one value with two edges."""
    graph = check(skips())
    assert [(edge.output, edge.target) for edge in graph.edges if edge.source == "parts.0"] == [
        (0, "parts.1"),
        (0, "last"),
    ]


class Asks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.requires_grad else 1.0)


def test_values_that_code_behind_them_asks_whether_they_require_a_gradient():
    """What leads to one counts; on the maker's rank a reader finds it as it is, and another rank does not."""
    graph = graph_of(workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Asks(8, 8), nn.Linear(8, 8))))
    assert [graph.values[Value(name, 0)].asked for name in ("0", "1", "2")] == [True, True, False]
    made = torch.ones(())
    check_asked("0", made, gradient=True, sent=False)
    check_asked("0", made.clone().requires_grad_(), gradient=True, sent=True)
    with pytest.raises(UsageError, match="'0' has no gradient now, and had one"):
        check_asked("0", made, gradient=True, sent=True)
    with pytest.raises(UsageError, match="'0' has a gradient now, and had none"):
        check_asked("0", made.clone().requires_grad_(), gradient=False, sent=False)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda x: x.is_leaf, lambda x: x.grad_fn is None])
def test_the_graph_behind_a_value_is_not_asked_for(ask: Callable[[torch.Tensor], bool]):
    """It begins anew at a partition, and between partitions; of what has none, and of its own, a partition may ask."""

    class Given(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if ask(x) else 1.0)

    class Own(nn.Linear):
        def forward(self, x):
            return (y := super().forward(x)) * (2.0 if ask(y) or not ask(y.detach()) else 1.0)

    def between(s, x):
        return s.b(h := s.a(x)) * (2.0 if ask(h) else 1.0)

    check(workload(lambda: nn.Sequential(Given(WIDTH, WIDTH), Own(WIDTH, WIDTH))))
    check(of(lambda s, x: s.c(s.b(s.a(x))) * (2.0 if x.is_leaf and s.a.weight.is_leaf else 1.0)))
    with pytest.raises(MarkingError, match=r"forward of .1. looks at the graph.*grad_fn.*test_partition_graph"):
        partition_graph(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Given(WIDTH, WIDTH))))
    with pytest.raises(MarkingError, match=r"(is_leaf|grad_fn).*between partitions.*test_partition_graph"):
        partition_graph(of(between, "a", "b"))


@pytest.mark.slow
@pytest.mark.parametrize("of_what", [lambda _, x: x, lambda layer, _: layer.weight])
def test_a_hook_on_the_node_of_a_value_is_refused(of_what: Callable[..., torch.Tensor]):
    """It would not act on all of the gradient; on a node of its own a partition may have one."""

    class Hooked(nn.Linear):
        def forward(self, x, of_what=of_what, *, is_own=False):
            made = super().forward(x)
            value = made if is_own else of_what(self, x)
            if value.requires_grad:
                get_gradient_edge(value).node.register_hook(lambda *_: None)
            return made

    class Own(Hooked):
        def forward(self, x):
            return super().forward(x, is_own=True)

    def between(s, x):
        get_gradient_edge(h := s.a(x)).node.register_prehook(lambda _: None)
        return s.b(h)

    check(workload(lambda: nn.Sequential(Own(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))))
    with pytest.raises(MarkingError, match=r"forward of .1. .* hooks on to its node or a weight's, at .*test_"):
        partition_graph(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked(WIDTH, WIDTH))))
    with pytest.raises(MarkingError, match=r"registers a hook on a node .* between partitions.*test_partition_graph"):
        partition_graph(of(between, "a", "b"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_gradient_of_a_value_is_not_asked_for():
    """Nor that of a weight, between partitions; a partition may ask for those of leaves that it has made."""

    class Given(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.grad is None else 1.0)

    class Own(nn.Linear):
        def forward(self, x):
            leaf = x.detach().requires_grad_()
            super().forward(leaf).sum().backward()
            return super().forward(x) + leaf.grad

    check(workload(lambda: nn.Sequential(Given(WIDTH, WIDTH), Own(WIDTH, WIDTH))))
    with pytest.raises(MarkingError, match=r"forward of .1. looks at the gradient"):
        partition_graph(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Given(WIDTH, WIDTH))))
    for ask in (lambda _, h: h.grad, lambda s, _: s.b.weight.grad):
        with pytest.raises(MarkingError, match=r"looks at the gradient .*between partitions.*test_partition_graph"):
            partition_graph(of(lambda s, x, ask=ask: s.b(h := s.a(x)) * (2.0 if ask(s, h) is None else 1.0), "a", "b"))


def test_a_value_is_not_sent_twice():
    """Glue runs where a value that it needs goes anyway, rather than that both are sent."""
    graph = check(of(lambda s, x: s.c(s.b(torch.tanh(y := s.a(x))) + y)))
    assert [(edge.source, edge.target) for edge in graph.edges] == [("a", "b"), ("b", "c")]


class Rich(nn.Module):
    """Takes and gives tuples, dicts, None and plain values, an integer and a boolean tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any, *, extra: Any = None, flag: bool = False, times: int = 1) -> Any:
        x, (count, positive) = state
        if flag:
            x = x * times + (0 if extra is None else extra["shift"])
        return self.linear(x).t().contiguous().t(), (count + 1, positive & (x > 0))


def test_nested_arguments_and_results():
    """Tensors inside tuples and dicts are edges; None, flags and numbers stay constants."""

    def forward(s, x):
        state = s.a((x, (torch.zeros(x.shape[0], dtype=torch.int32), x > -9)), flag=True, times=2)
        state = s.b(state, extra={"shift": x, "unused": None}, flag=True, times=x.shape[1])
        y, (count, positive) = s.c(state)
        return OrderedDict(y=y, parts=(count, None, positive), text="done")

    graph = check(of(forward, a=Rich, b=Rich, c=Rich))
    assert [value.dtype for key, value in graph.values.items() if key.partition == "a"] == [
        torch.float64, torch.int32, torch.bool,
    ]  # fmt: skip
    assert [edge.gradient for edge in graph.edges if edge.source == "a"] == [True, False, False]


@dataclass
class Output:
    """A result as Hugging Face models have it."""

    hidden: torch.Tensor
    cache: Any = None


pytree.register_dataclass(Output)


def test_outputs_that_are_dataclasses():
    """A partition may return a registered dataclass."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> Output:
            return Output(super().forward(x))

    def layer() -> nn.Module:
        return Layer(WIDTH, WIDTH)

    check(of(lambda s, x: s.c(s.b(s.a(x).hidden).hidden), a=layer, b=layer, c=layer))


class Used(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_outputs_with_a_buffer_that_the_last_module_changes():
    """It stays in its place beside plain values, and is read last."""
    check(of(lambda s, x: (0.5, s.c(s.b(s.a(x))), None, s.c.calls), c=Used))


@pytest.mark.long
def test_transformer_layers():
    """nn.Transformer's layers with a causal mask; the mask is no edge."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
            )
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
            for layer in self.layers:
                x = layer(x, src_mask=mask, is_causal=True)
            return self.attention(x, x, x, need_weights=False)[0]

    graph = check(workload(Model, "layers.*", "attention", batch=tokens))
    assert edges(graph) == {("layers.0", "layers.1"), ("layers.1", "attention")}
    assert "embedding.weight" in graph.piece["layers.0"].parameters


def test_keyword_inputs_in_any_order():
    """A batch that is a dict reaches the arguments of the same names."""

    def batch(rows: int, generator: torch.Generator) -> Any:
        (left, right), target = pairs(rows, generator)
        return {"right": right, "left": left * 3}, target

    def forward(s, left, right, scale=None):
        return s.c(s.b(s.a(left)) * right)

    graph = check(of(forward, batch=batch))
    assert edges(graph) == {("a", "b"), ("b", "c")}


@pytest.mark.long
def test_glue_goes_where_fewer_bytes_cross():
    """Narrowing glue runs with its producer, widening glue with its reader."""
    narrow = check(of(lambda s, x: s.b(s.a(x)[:, :2].sum(1, keepdim=True)), "a", "b", b=lambda: nn.Linear(1, WIDTH)))
    assert [edge.bytes_per_sample for edge in narrow.edges] == [8]
    wide = check(of(lambda s, x: s.b(s.a(x).repeat(1, 5) * 2), "a", "b", b=lambda: nn.Linear(5 * WIDTH, 1)))
    assert [edge.bytes_per_sample for edge in wide.edges] == [8 * WIDTH]


def test_unmarked_modules_and_parameters():
    """What is not marked belongs to a neighbour: modules, parameters and buffers that glue uses directly."""

    def forward(s, x):
        x = torch.relu(s.before(x) * s.a.bias)
        x = s.b(s.a(x) + s.table)
        return s.c(s.after(x)) * s.gain

    made = of(
        forward, before=lambda: nn.Linear(WIDTH, WIDTH), after=lambda: nn.BatchNorm1d(WIDTH),
        gain=lambda: nn.Parameter(torch.full((1,), 2.0)), table=lambda: nn.Buffer(torch.arange(float(WIDTH))),
    )  # fmt: skip
    graph = check(made)
    held = {name: piece.name for piece in graph.pieces for name in piece.state}
    assert held["before.weight"] == "a"
    assert held["after.running_mean"] in ("b", "c")
    assert held["gain"] == "c"
    assert held["table"] in ("a", "b")
    assert set(made.model().state_dict()) == set(held)


def test_patterns_in_place_of_the_workloads_own():
    """Given patterns replace the workload's, so that a model can be cut finer or coarser than its author meant."""
    assert [piece.name for piece in graph_of(skips()).pieces] == ["parts.0", "parts.1", "parts.2", "last"]
    assert [piece.name for piece in partition_graph(skips(), ["parts.1", "last"]).pieces] == ["parts.1", "last"]


@pytest.mark.long
def test_a_plan_of_marks_in_code_alone_finds_them_again():
    """Profiled with --mark in place of the workload's patterns, where what it names is marked in code by a name."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(8, 8), partition(nn.Linear(8, 8), name="tail")

        def forward(self, x):
            return self.c(self.a(x))

    made = replace(workload(Net), marks=("a",))
    graph = partition_graph(made, ["c"])
    assert [piece.name for piece in graph.pieces] == ["tail"]
    plan = SimpleNamespace(
        partitions=("tail",), micro_batches=1, is_replicated=False, holders={"tail": ("worker:0/cpu",)},
        workload=SimpleNamespace(fingerprint=graph.fingerprint, name=made.name, batch_size=8, inputs=""),
    )  # fmt: skip
    assert [piece.name for piece in plan_graph(made, plan).pieces] == ["tail"]
    assert [piece.name for piece in partition_graph(made).pieces] == ["a", "tail"]
    assert [piece.name for piece in partition_graph(made, ()).pieces] == ["tail"]


def test_the_fingerprint_is_the_models():
    """Equal models have equal fingerprints; what differs in the graph differs in the fingerprint."""
    graph = graph_of(language())
    assert partition_graph(language()).fingerprint == graph.fingerprint
    assert partition_graph(language(tied=False)).fingerprint != graph.fingerprint
    assert partition_graph(language(), ["norm"]).fingerprint != graph.fingerprint


def test_the_fingerprint_does_not_hang_on_where_an_object_lies():
    """A module may show a function that it calls, which lies elsewhere in each process."""

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.called = nn.Parameter(torch.ones(8)), lambda x: 2 * x
            kept.append(self.called)

        def extra_repr(self):
            return f"called={self.called}"

        def forward(self, x):
            return self.called(x * self.weight)

    kept = []
    made = replace(workload(lambda: nn.Sequential(Called(), Called())), marks=("0", "1"))
    graphs = [partition_graph(made) for _ in range(2)]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert len({str(each) for each in kept}) == len(kept)
