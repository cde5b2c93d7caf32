"""What a forward may contain between its partitions: changes in place, buffers, regions, other shapes, and errors."""

from __future__ import annotations

import copy
import importlib
import operator
import pickle
import random
import re
import sys
import threading
import types
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from cutting import check, edges, of, outputs
from sweeps import sweep
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.autograd.graph import get_gradient_edge
from workloads import WIDTH, Reference, graph_of, language, make_plan, numbers, pipeline_of, workload

from assigner.errors import MarkingError, UsageError
from assigner.model.marking import PartitionModule, Value, partition_graph
from assigner.model.marking.cut import recut

if TYPE_CHECKING:
    from collections.abc import Callable


def test_in_place_glue():
    """`x += 1` between partitions, on the batch itself, and on a mask made from shapes runs out of place."""

    def forward(s, x):
        x *= 2
        mask = torch.ones(x.shape[1], dtype=torch.float64)
        mask.mul_(3)
        y = s.a(x)
        y += 1
        z = s.b(y * mask)
        z.clamp_(min=0)
        return s.c(z * mask)

    graph = check(of(forward))
    assert edges(graph) == {("a", "b"), ("b", "c")}


def test_a_write_that_autograd_does_not_see_in_front_of_all_readers():
    """Also of what one has read that has no backward, and of another one's copy."""

    def forward(s, x):
        y = s.a(x)
        with torch.no_grad():
            s.d(y)
        y.data.clamp_(min=0)
        z = y.clone()
        made = s.b(y)
        z.data.mul_(2)
        return s.c(made + z)

    check(of(forward, d=lambda: nn.Linear(WIDTH, WIDTH)))


class HandsOut(nn.Linear):
    """Returns, beside what it computes, a buffer and a plain tensor of its own, and its weight; its bias is tied."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.table = torch.ones(WIDTH, dtype=torch.float64)
        self.shift = self.bias

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.mean, self.table, self.weight


class Moves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        mean.add_(x.detach().mean(0))
        return super().forward(x) + mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda mean, **_: mean.add_(1), "lies in the memory of a parameter or buffer"),
        (lambda s, **_: s.a.mean.add_(1), "shares memory with a value that is changed in place"),
        (lambda weight, **_: weight[1:].data.mul_(2), "lies in the memory of a parameter or buffer"),
        (lambda s, mean, **_: s.d(mean, mean), "lies in the memory of a parameter or buffer"),
        (lambda table, **_: table.mul_(2), "changes a tensor of the model that is no buffer"),
        (lambda s, **_: s.a.shift.data.mul_(2), "or it has another name, too"),
    ],
    ids=["glue", "its own name", "a weight's view", "another module", "no buffer", "tied"],
)
def test_what_a_module_has_and_returns_is_written_elsewhere(write: Callable[..., Any], message: str):
    """The worker that runs the module would not see it, and nor would the next forward."""

    def forward(s, x):
        x, mean, table, weight = s.a(x)
        write(s=s, mean=mean, table=table, weight=weight)
        return s.c(s.b(x) + mean * table) @ weight

    with pytest.raises(MarkingError, match=message):
        partition_graph(of(forward, a=HandsOut, d=Moves))


def test_in_place_modules_between_readers():
    """A module that overwrites its input spoils nothing for one that has read it before."""

    def forward(s, x):
        y = s.a(x)
        z = s.b(y)
        return s.c(s.relu(y) + z)

    check(of(forward, relu=lambda: nn.ReLU(inplace=True)))


def _beside_a_parameter(s, x, **rest):
    return s.c(s.b(s.a(x)) + rest["shift"])


def _alone(s, **rest):
    return s.c(s.b(s.a(rest["x"])) + rest["shift"])


def _never_read(s, x, **rest):
    return s.c(s.b(s.a(x)))


def _behind_all_others(s, x=None, *others, flag, unread, **rest):
    return s.c(s.b(s.a(x)) * (1 + flag)) + rest["shift"]


def _of_one_name(s, x, flag=False, **shift):
    return s.c(s.b(s.a(x)) + shift["shift"] * flag)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_beside_a_parameter, _alone, _never_read, _behind_all_others, _of_one_name])
def test_keywords_that_no_parameter_names(forward: Callable[..., Any]):
    """Inputs may land in the `**kwargs` of the model's forward, whether read there or not, in any order."""

    def batch(rows: int, generator: torch.Generator) -> Any:
        x, y = numbers(rows, generator)
        return {"shift": x.cos(), "flag": True, "x": x, "unread": [x > 0, 3]}, y

    check(of(forward, batch=batch))


def test_a_keyword_that_no_parameter_can_have():
    """It is refused by its name."""

    def batch(rows: int, generator: torch.Generator) -> Any:
        x, y = numbers(rows, generator)
        return {"x": x, "shift.x": x}, y

    with pytest.raises(MarkingError, match=r"is given 'shift\.x', which is no name of a parameter"):
        partition_graph(of(_never_read, batch=batch))


def test_a_buffer_that_counts():
    """Glue may change a buffer of the model."""

    def forward(s, x):
        s.count += 1
        return s.c(s.b(s.a(x)))

    made = of(forward, count=lambda: nn.Buffer(torch.zeros(())))
    graph = partition_graph(made)
    modules = graph.build([piece.name for piece in graph.pieces])
    holder = next(piece.name for piece in graph.pieces if "count" in piece.buffers)
    modules[holder](*[torch.zeros(2, WIDTH, dtype=torch.float64) for _ in graph.piece[holder].reads])
    assert modules[holder].get_buffer("count") == 1


def test_frozen_parts():
    """Behind frozen weights no gradient comes back, behind trained ones it does."""

    def frozen() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    graph = check(of(lambda s, x: s.c(s.b(s.a(x))), a=frozen))
    assert {edge.source: edge.gradient for edge in graph.edges} == {"a": False, "b": True}


def test_random_glue_runs_once():
    """Dropout between partitions belongs to one of them."""
    graph = partition_graph(of(lambda s, x: s.c(F.dropout(s.b(F.dropout(s.a(x), 0.5, s.training)), 0.5, s.training))))
    drawn = [node for piece in graph.pieces for node in piece.graph.nodes if "dropout" in str(node.target)]
    assert len(drawn) == 2


def test_gradients_may_be_switched_off():
    """A region under torch.no_grad() is cut like the rest, with a marked module in it, and its values are detached."""

    def forward(s, x):
        y = s.a(x)
        with torch.no_grad():
            scale = s.b(y).abs().mean(1, keepdim=True)
            with torch.enable_grad():
                scale = scale + 1
        return s.c(y / scale)

    made = of(forward)
    graph = check(made)
    assert edges(graph) >= {("a", "b"), ("b", "c")}
    reference, x, y = Reference(made), made.make_batch(4, 0)[0], torch.zeros(4, WIDTH, dtype=torch.float64)
    reference.loss((x, y)).backward()
    modules = graph.build(["a", "b", "c"])
    values = {Value("", 0): x}
    for piece in graph.pieces:
        made_here = modules[piece.name](*[values[value] for value in piece.reads])
        values.update({Value(piece.name, n): each for n, each in enumerate(made_here)})
    made.loss(made_here[0], y).backward()
    found = {name: each.grad for module in modules.values() for name, each in module.named_parameters()}
    assert found.pop("b.weight") is None
    assert found.pop("b.bias") is None
    assert reference.gradient_distance(found) < 1e-12


def test_a_hook_between_partitions_may_be_removed_again():
    """Its handle takes it back, as that of any tensor does; another one on the same tensor stays."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)
            h.register_hook(lambda gradient: gradient * 5).remove()
        return s.c(s.b(h)).sum(1, keepdim=True)

    made = of(forward)
    reference, batch = Reference(made), made.make_batch(8, seed=1)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)
        assert reference.gradient_distance(pipeline.gradients()) < 1e-12


@pytest.mark.parametrize("outer", [True, False])
def test_modules_of_any_name(outer):
    """Words of Python's, letters that it takes for others, quotes: in a partition's graph, or between partitions."""
    names = ("in", "µ", 'a"b', "last", "None")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x).tanh()
            return x.sum(1, keepdim=True)

    made = workload(Named, *([f"layers.{name}" for name in names] if outer else ["layers.last"]))
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        batch = made.make_batch(8, seed=1)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)


def test_the_modules_of_a_partition_stand_in_its_graph_s_order():
    """The same on every rank, whatever its hashes: ranks go through them when they add up figures of BatchNorms."""
    names = [f"layer{n}" for n in (7, 3, 11, 0, 5, 9, 2)]
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in names}
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for name in names:
        x = graph.call_module(name, (x,))
    graph.output(x)
    assert [name for name, _ in PartitionModule(layers, graph).named_children()] == names


class TakenNames(nn.Module):
    """What a module of torch.fx calls its own, as modules, a parameter and a buffer of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last, self.meta = nn.Linear(WIDTH, 1), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("recompile", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.graph(self.code(x)) * self.meta + self.recompile
        return self.last(x @ self.graph[0].weight * self.code.bias)


@pytest.mark.parametrize("marks", [("code", "graph", "last"), ("graph.0", "last"), ("last",)], ids=len)
def test_names_that_torch_fx_takes(marks, tmp_path):
    """They are called, read between partitions, trained, saved and moved."""
    made = workload(TakenNames, *marks)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for seed in (1, 2):
            batch = made.make_batch(8, seed=seed)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)
            assert reference.gradient_distance(pipeline.gradients()) < 1e-12
        pipeline.save(tmp_path / "saved")
        assert pipeline.state_dict().keys() == made.model().state_dict().keys()
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        pipeline.load(tmp_path / "saved")
        batch = made.make_batch(8, seed=3)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)


@pytest.mark.long
def test_regions_that_cannot_be_cut():
    """Glue under torch.autocast is refused in words."""

    def forward(s, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = s.a(x) @ s.a.weight
        return s.c(s.b(y.double()))

    with pytest.raises(MarkingError, match=r"region \(wrap_with_autocast\) that cannot be cut \("):
        partition_graph(of(forward))


@pytest.mark.long
def test_a_region_in_vmap():
    """Masks that transformers makes with torch.vmap have regions inside: it is vmap that is refused, with the line."""

    def forward(s, x):
        table = torch.ones(WIDTH, dtype=torch.bool)
        with TransformGetItemToIndex():
            mask = torch.vmap(lambda n: table[n])(torch.arange(WIDTH))
        return s.c(s.b(s.a(x) * mask))

    with pytest.raises(MarkingError, match=r"torch\.vmap between partitions \(mask = torch.vmap"):
        partition_graph(of(forward))


@pytest.mark.long
def test_shapes_of_more_than_the_rows():
    """Another sequence length than that of the example is worked out anew."""
    graph = graph_of(language())
    ids = torch.zeros(2, 3, dtype=torch.long)
    reference = Reference(language())
    torch.testing.assert_close(outputs(graph, ids), reference.model(ids), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda s, x: s.c(s.b(s.a(x)) if x.sum() > 0 else x), r"cannot be traced at .*test_capture\.py:\d+"),
        (lambda s, x: s.b(s.a(x)), "'c' is marked, and the model's forward never calls it"),
        (lambda s, x: s.c(s.a(s.b(s.a(x)))), "'a' is called again with what 'b' made"),
        (lambda s, x: s.c(s.b(s.a(x))[: int((x > 0).sum())]), "a tensor's value decides what runs there"),
        (lambda s, x: s.c(s.b(y := s.a(x)) + y.data.clamp_(0)), r"in place through \.data .*'b' was given before"),
    ],
    ids=["control flow on values", "never called", "around another", "a slice as long as data says", "read before"],
)  # fmt: skip
def test_what_cannot_be_cut(forward, message):
    """One clear error each, with what to do."""
    with pytest.raises(MarkingError, match=message) as caught:
        partition_graph(of(forward))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "message", "hint"),
    [
        (lambda x: [x, x, x], r"a list of 3, which is taken for as many .*forward\(x\): too many", r"\(x,\)"),
        (lambda x: {"y": x}, "a dict of 1, which is taken for .*: missing a required argument: 'x'", "by name"),
    ],
    ids=["a list", "a dict"],
)  # fmt: skip
def test_inputs_that_the_forward_does_not_take(inputs: Callable[[torch.Tensor], Any], message: str, hint: str):
    """A list is taken for several arguments: what gives it as one is said."""

    def batch(rows: int, generator: torch.Generator) -> Any:
        x, y = numbers(rows, generator)
        return inputs(x), y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, 1)

        def forward(self, x: Any) -> torch.Tensor:
            return self.a(x)

    with pytest.raises(MarkingError, match=message) as caught:
        partition_graph(workload(Net, "a", batch=batch))
    assert re.search(hint, caught.value.hint or "")


class Chosen(nn.Module):
    """Several sizes that depend on its input, of which some stay within."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return torch.cat([y[y[:, 0] > 0], y[y[:, 1] > 0]]), y[y[:, 2] > 0].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.c(s.b(s.a(x)[x[:, 0] > 0])),
        lambda s, x: s.c(s.b(x[torch.nonzero(x[:, 0] > 0).flatten()] + 1) * s.a(x).mean()),
        lambda s, x: s.c((z := s.chosen(s.a(x))[0]).view(z.shape[0], 2, 4).flatten(1)) * s.b(x).sum(),
        lambda s, x: s.c(s.b(s.chosen(s.a(x))[0]).sum(0, keepdim=True)) + s.chosen(x)[1],
        lambda s, x: s.c(s.b(s.a(x))) + torch.unique((x[:, 0] > 0).long()).sum(),
    ],
    ids=["mask", "nonzero", "a module, its size in glue", "two sizes added", "unique"],
)
def test_sizes_that_depend_on_data(forward):
    """Values whose shape depends on data pass between partitions; their shape is known when they are there."""
    check(of(forward, chosen=Chosen))


class Notes:
    """An object of the user's own that is handed from module to module."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Noting(nn.Linear):
    """Keeps what it makes in another way than by returning it."""

    def forward(self, x: torch.Tensor, notes: Notes | None = None) -> torch.Tensor:
        made = super().forward(x)
        (getattr(self, "notes", None) or notes or Notes()).kept.append(made)
        return made + 1


@pytest.mark.long
def test_objects_between_partitions():
    """A module that is given an object is named with the object's type: what that carries would not be sent."""

    def forward(s, x):
        notes = Notes()
        return s.c(s.b(s.a(x), notes))

    with pytest.raises(MarkingError, match="'b' is given a Notes, which is neither a tensor nor a plain value"):
        partition_graph(of(forward, b=lambda: Noting(WIDTH, WIDTH)))


class Centred(nn.Module):
    """Takes the mean off, and gives a function that puts it back; what it scales by is its own."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(*inner), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        mean = x.mean(1, keepdim=True)
        return self.inner(x - mean) * self.scale, lambda y: y / self.scale + mean


class Undone(nn.Module):
    """Calls a function that it is given."""

    def forward(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(x)


class Weighed(nn.Linear):
    """Needs values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.detach().numpy().max())


class Asking(Centred):
    """Needs values, and gives a function."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        assert x.detach().numpy().max() > -100
        return super().forward(x)


@pytest.mark.long
@pytest.mark.parametrize("inner", [nn.Linear, Weighed])
def test_objects_of_unmarked_modules(inner):
    """What unmarked modules hand on stays in the code between partitions: theirs is followed as a part of it."""

    def forward(s, x):
        x, back = s.d(x)
        x, again = s.f(s.a(x))
        return s.e(s.c(again(s.b(x))), back)

    made = of(forward, d=lambda: Centred(inner(WIDTH, WIDTH)), e=Undone, f=Centred)
    graph = check(made)
    assert graph.canonical.keys() == {*made.model().state_dict()}
    again = recut(graph, graph.domain.example.structure, [torch.randn(5, WIDTH, dtype=torch.float64)], training=False)
    assert [piece.name for piece in again.pieces] == [piece.name for piece in graph.pieces]


@pytest.mark.long
def test_objects_of_unmarked_modules_that_cannot_be_followed():
    """The module is named, with what it hands on, and the line that cannot be followed."""
    made = of(lambda s, x: s.b(s.d(s.a(x))[0]), "a", "b", d=Asking)
    with pytest.raises(MarkingError, match=r"cannot be traced at .*test_capture\.py:\d+ \(assert") as caught:
        partition_graph(made)
    assert "'d' returns a function" in caught.value.hint
    assert "mark a larger module around 'd'" in caught.value.hint


@pytest.mark.long
def test_tensors_that_leave_a_partition_by_the_back_door():
    """What a hook or an attribute carries in or out of a partition is refused: nobody would send it."""

    def outwards(s, x):
        made = s.b(s.a(x))
        return s.c(made + s.b.notes.kept[0])

    def inwards(s, x):
        s.b.notes = Notes()
        return s.c(s.b(s.a(x)))

    def noting() -> nn.Module:
        made = Noting(WIDTH, WIDTH)
        made.notes = Notes()
        return made

    with pytest.raises(MarkingError, match="the forward of 'b' changes its attribute 'notes'"):
        partition_graph(of(outwards, b=noting))
    with pytest.raises(MarkingError, match=r"attribute b\.notes is set from outside before 'b' is called"):
        partition_graph(of(inwards, b=noting))


class Tally:
    """Counts for all of its users."""

    n = 0


TALLIES = types.ModuleType("tallies")
TALLIES.n, TALLIES.cache, TALLIES.by = 0, {}, {"n": 0}  # type: ignore[attr-defined]
sys.modules["tallies"] = TALLIES


def count_in_class(_: int) -> None:
    """In a helper class of the file."""
    Tally.n += 1


def count_in_module(_: int) -> None:
    """In another file."""
    TALLIES.n += 1


def count_in_dict(_: int) -> None:
    """In a dict of another file."""
    TALLIES.by["n"] += 1


def count_in_function(_: int) -> None:
    """In an attribute of a function of the file."""
    count_in_function.n = getattr(count_in_function, "n", 0) + 1  # type: ignore[attr-defined]
    count_in_function.n += 1  # type: ignore[attr-defined]


SCALE, SCALES = torch.ones((), device="cpu"), torch.ones(WIDTH, device="cpu")
DRAWS = random.Random(1)


def scale_by_one(_: int) -> None:
    """In a tensor of the file, of one element: a capture would compute with its value."""
    SCALE.mul_(2)


def scale_by_many(_: int) -> None:
    """In a larger one."""
    SCALES.mul_(2)


def draw(_: int) -> None:
    """From a generator of the file."""
    DRAWS.random()


class Scaled(nn.Linear):
    """Writes tensors of its class, which a recompute finds as the forward found them."""

    scale, scales = torch.ones((), device="cpu"), torch.ones(WIDTH, device="cpu")

    def forward(self, x):
        self.scale.mul_(2)
        self.scales.mul_(2)
        return super().forward(x)


def test_a_tensor_of_a_class_is_left_as_it_was():
    """Also one of a single element, with whose value a capture computes."""
    assert partition_graph(of(lambda s, x: s.c(s.b(s.a(x))), b=lambda: Scaled(WIDTH, WIDTH)))
    assert Scaled.scale == Scaled.scales.mean() == 1


def fill_cache(size: int) -> None:
    """Makes once what it takes from there later."""
    TALLIES.cache.setdefault(size, torch.ones(size))


class Leaves(nn.Linear):
    """Leaves something behind."""

    def __init__(self, leave: Callable[[int], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.leave = leave.__name__  # by name: what a module holds is put back

    def forward(self, x):
        globals()[self.leave](x.shape[-1])
        return super().forward(x)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (count_in_class, r"Tally\.n"), (count_in_module, r"tallies\.n"), (count_in_dict, r"tallies\.by\['n'\]"),
        (count_in_function, r"count_in_function\.n"), (scale_by_one, r"test_capture\.SCALE in place"),
        (scale_by_many, r"test_capture\.SCALES in place"), (draw, r"test_capture\.DRAWS"),
    ],
)  # fmt: skip
def test_what_a_forward_counts_where_no_module_leads(leave, name):
    """Nobody could put it back where the forward runs again: it is refused, and is as it was."""
    count_in_function.n = 0  # type: ignore[attr-defined]
    with pytest.raises(MarkingError, match=rf"'b' changes {name}, which nobody can put back"):
        partition_graph(of(lambda s, x: s.c(s.b(s.a(x))), b=lambda: Leaves(leave)))
    assert SCALE == SCALES.mean() == 1
    assert (Tally.n, TALLIES.n, TALLIES.by, count_in_function.n) == (0, 0, {"n": 0}, 0)  # type: ignore[attr-defined]


def test_a_cache_of_another_file_is_left_empty():
    """What is no number may be kept there for the next call; a capture takes its own values back."""
    assert partition_graph(of(lambda s, x: s.c(s.b(s.a(x))), b=lambda: Leaves(fill_cache)))
    assert TALLIES.cache == {}


class Steep(nn.Linear):
    """The slope of what it makes of two values, with respect to the first."""

    def forward(self, x, y):
        x = x if x.requires_grad else x.detach().requires_grad_()  # in an evaluation
        with torch.enable_grad():
            made = (super().forward(x) * y).sum()
            (slope,) = torch.autograd.grad(made, x, create_graph=True)
        return slope


class SteepInAll(Steep):
    """Likewise, of the second value alone."""

    def forward(self, x, y):
        slope = torch.autograd.grad(y.square().sum(), x, create_graph=True, allow_unused=True)[0]
        return x if slope is None else nn.Linear.forward(self, slope)


class SteepByEdge(Steep):
    """Likewise of both, with respect to the first as an edge of the graph."""

    def forward(self, x, y):
        x = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            made = (nn.Linear.forward(self, x) * y).sum()
            (slope,) = torch.autograd.grad(made, get_gradient_edge(x), create_graph=True)
        return slope


class SteepByValue(Steep):
    """Likewise, and what it makes needs the values."""

    def forward(self, x, y):
        return super().forward(x, y) * float(x.detach().numpy().sum())


@pytest.mark.long
@pytest.mark.parametrize("kind", [Steep, SteepInAll, SteepByEdge, SteepByValue])
def test_gradients_of_what_another_partition_has_made(kind):
    """The part that goes through the other partition would be missing; where nothing does, the slope is whole."""

    def missing(s, x):
        first = s.a(x)
        return s.b(first, s.c(first))

    def whole(s, x):
        return s.b(s.a(x), s.c(x))

    with pytest.raises(MarkingError, match="the forward of 'b' takes a gradient with respect to one of the values"):
        partition_graph(of(missing, b=lambda: kind(WIDTH, WIDTH)))
    if kind is Steep:
        check(of(whole, b=lambda: kind(WIDTH, WIDTH)))
        check(of(lambda s, x: s.b(s.a(x).detach().requires_grad_(), s.c(x)), b=lambda: kind(WIDTH, WIDTH)))


INSTALLED = """
import torch
from torch import nn

class Picky(nn.Linear):
    def forward(self, x):
        return super().forward(x), x if x.sum() > 0 else None

def forward(s, x):
    x = s.a(x)
    slope, = torch.autograd.grad(x.sum(), x)
    return s.c(s.b(x + slope))
"""


@pytest.mark.long
def test_a_refusal_of_an_installed_packages_code_has_its_line(tmp_path, monkeypatch):
    """Not the user's line that has called the pipeline, nor that of the script which has started the program."""
    file = tmp_path / "site-packages" / "installed_net.py"
    file.parent.mkdir()
    file.write_text(INSTALLED)
    monkeypatch.syspath_prepend(file.parent)
    installed = importlib.import_module("installed_net")
    picks, slopes = (f"at {re.escape(str(file))}:{n} " for n in (7, 11))
    with pytest.raises(MarkingError, match=f"computes gradients between partitions, {slopes}"):
        partition_graph(of(installed.forward))
    with pytest.raises(MarkingError, match=f"decides what 'b' returns, {picks}"):
        partition_graph(of(lambda s, x: s.b(s.a(x))[0], "a", "b", b=lambda: installed.Picky(WIDTH, WIDTH)))


@pytest.mark.long
def test_outputs_that_hold_tensors_in_their_own_way():
    """An output of an unknown type is named; a larger mark is not what helps there."""

    def forward(s, x):
        notes = Notes()
        notes.kept.append(s.c(s.b(s.a(x))))
        return notes

    with pytest.raises(
        MarkingError, match=r"returns a test_capture\.Notes, which holds tensors in its own way"
    ) as caught:
        partition_graph(of(forward))
    assert "dataclasses" in caught.value.hint


def test_a_mark_that_is_never_called():
    """The hint names modules that are."""
    made = of(lambda s, x: s.d(s.b(s.a(x))), d=lambda: nn.Linear(WIDTH, WIDTH))
    with pytest.raises(MarkingError, match="'c' is marked, and the model's forward never calls it") as caught:
        partition_graph(made)
    assert "as d " in caught.value.hint


def test_a_forward_that_is_called_by_name():
    """It is a call of its module, also of one that calls its own forward again; past hooks it is refused."""

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor, *, again: bool = True) -> torch.Tensor:
            return self.forward(-x, again=False) if again else super().forward(x)

    class Doubled(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return s.c.forward(s.b.forward(s.a(x)) + s.b.forward(x))

    check(of(forward, b=lambda: Twice(WIDTH, WIDTH)))
    hooked = of(forward, c=lambda: torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(MarkingError, match=r"'c' is called by that name, at .*test_capture\.py:\d+ \(return s\.c\.for"):
        partition_graph(hooked)
    with pytest.raises(MarkingError, match="'b' is marked, and the model's forward never calls it"):
        partition_graph(of(forward, b=lambda: Doubled(WIDTH, WIDTH)))


def test_a_mark_that_is_passed_by():
    """That the forward calls a module in it comes before what the code of that module does then."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    made = of(lambda s, x: s.c(s.b[0](s.a(x))), b=lambda: nn.Sequential(Counting(WIDTH, WIDTH)))
    with pytest.raises(MarkingError, match=r"never calls 'b', only modules in it.*: it changes b\.0\.calls"):
        partition_graph(made)


MASKS: dict[int, torch.Tensor] = {}


def test_a_dict_that_forwards_fill():
    """Partitions would each have to find what others have made: the hint names what is kept apart for each."""

    def mask(n: int) -> torch.Tensor:
        if n not in MASKS:
            MASKS[n] = torch.ones(n, dtype=torch.float64)
        return MASKS[n]

    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * mask(WIDTH)

    def masked() -> nn.Module:
        return Masked(WIDTH, WIDTH)

    with pytest.raises(MarkingError, match=r"MASKS\[\d+\] is set from outside before 'b' is called") as caught:
        partition_graph(of(lambda s, x: s.c(s.b(s.a(x) * mask(WIDTH))), b=masked))
    assert "functools.cache" in caught.value.hint


@pytest.mark.long
def test_control_flow_on_values_in_a_partition():
    """Whichever way it goes, the outputs are of one structure: a shape may depend on it, else the line is named."""

    class Routed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    class Shortened(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x[:, :1]

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return super().forward(x), x if x.sum() > 0 else None

    check(of(lambda s, x: s.c(s.b(s.a(x))), b=lambda: Routed(WIDTH, WIDTH)))
    check(of(lambda s, x: s.c(s.a(x) + s.b(s.a(x)).sum(1, keepdim=True)), b=lambda: Shortened(WIDTH, WIDTH)))
    made = of(lambda s, x: s.b(s.a(x))[0], "a", "b", b=lambda: Doubled(WIDTH, WIDTH))
    with pytest.raises(MarkingError, match=r"decides what 'b' returns, at .*test_capture\.py:\d+") as caught:
        partition_graph(made)
    assert "tensor operations" in caught.value.hint


def test_losses_without_reduction():
    """torch gives them the shape of a scalar where a module's forward is captured whole: not here."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.layer(x), x.argmax(1), reduction="none")

    check(of(lambda s, x: s.c(s.a(x)) * s.b(x) * s.scored(x)[:, None], "a", "b", "c", "scored", scored=Scored))


@pytest.mark.long
def test_changes_in_place_that_others_must_see():
    """Whoever reads the value, or a view of it, afterwards sees the change."""

    def views(s, x):
        y = s.a(x)
        view = y.view(-1)
        y.add_(1)
        return s.c(s.b(y)) + view.sum()

    def parts(s, x):
        y = s.a(x)
        y[:, 0] = 0
        return s.c(s.b(y))

    def module(s, x):
        y = s.a(x)
        return s.c(s.relu(s.b(y)) + s.relu(y) + y)

    for forward in (views, parts, module):
        check(of(forward, relu=lambda: nn.ReLU(inplace=True)))


def test_what_other_threads_print_is_seen(capsys):
    """While a model is captured its own prints are kept off the screen, and nobody else's: of a failure, say."""

    def forward(self, x):
        print("the forward's own")  # noqa: T201
        other = threading.Thread(target=lambda: print("another thread's", file=sys.stderr, flush=True))  # noqa: T201
        other.start()
        other.join()
        return self.c(self.b(self.a(x)))

    partition_graph(of(forward))
    seen = capsys.readouterr()
    assert "own" not in seen.out
    assert "another thread's\n" in seen.err


def test_what_other_threads_do_meanwhile_is_no_part_of_the_forward():
    """One may convert a copy of the weights, and train another model, whose Functions run as they are."""
    other = nn.Linear(2, 2)

    def meanwhile() -> None:
        Reversed.apply(other(torch.ones(1, 2)), [nn.Tanh()]).sum().backward()
        other.weight.register_post_accumulate_grad_hook(lambda _: None)
        other.half()

    def forward(s, x):
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return s.c(s.b(s.a(x)))

    graph = partition_graph(of(forward))
    assert edges(graph) == {("a", "b"), ("b", "c")}
    assert other.weight.dtype is torch.float16
    assert other.weight.grad is not None


@pytest.mark.long
def test_the_model_is_left_alone():
    """After the cut the model has its own forwards and its meta tensors again, also where the cut failed."""
    models = []

    def builder() -> nn.Module:
        models.append(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 1)))
        return models[-1]

    partition_graph(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), builder())))
    with pytest.raises(MarkingError):
        partition_graph(workload(lambda: nn.Sequential(builder(), nn.Linear(3, 3))))
    for model in models:
        assert all("_call_impl" not in module.__dict__ for module in model.modules())
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_the_line_that_fixes_the_rows_is_named():
    """A list of the rows makes a capture one for their number, though no code of the user's says a number; or NumPy."""

    def listed(s, x):
        rows = list(s.a(x))
        return s.c(s.b(torch.stack(rows)))

    def tiled(s, x):
        rows = np.tile(np.arange(WIDTH), [x.shape[0], 1])
        return s.c(s.b(s.a(x) + torch.from_numpy(rows)))

    for forward, line in ((listed, "list"), (tiled, "np.tile")):
        with pytest.raises(MarkingError, match=rf"a number at .*test_capture\.py:\d+ \(rows = {line}\(") as caught:
            partition_graph(of(forward))
        assert "torch.arange(n)[None].expand(len(x), -1)" in (caught.value.hint or "")
    positions = torch.arange(WIDTH)[None]
    assert check(of(lambda s, x: s.c(s.b(s.a(x) + positions.expand(len(x), -1))))).domain


MADE: list[nn.Module] = []
FEATURES: dict[str, torch.Tensor] = {}


class Keeping(nn.Linear):
    """Leaves something behind."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.aux, self.cache = torch.zeros(()), dict[str, torch.Tensor]()
        self.register_forward_hook(lambda _, __, made: FEATURES.update(hidden=made))

    def forward(self, x):
        made = super().forward(x)
        self.aux = made.mean()
        self.cache["h"] = made
        return made

    def penalty(self) -> torch.Tensor:
        return self.aux * 2

    @property
    def doubled(self) -> torch.Tensor:
        return self.penalty()


def _left(term: Callable[[Any], Any]) -> Any:
    own: list[nn.Module] = []  # what one capture has looked at is no other one's

    def model() -> nn.Module:
        own[:] = MADE[:] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(), nn.Linear(WIDTH, 1))]
        return MADE[0]

    return workload(model, loss=lambda made, y: F.mse_loss(made, y) + term(MADE[-1]))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "name"),
    sweep([
        (lambda model: model[1].aux, "aux"),
        (lambda model: sum(getattr(each, "aux", 0) for each in model), "aux"),
        (lambda model: operator.attrgetter("aux")(model[1]), "aux"),
        (lambda model: weakref.ref(model[1])().doubled, "aux"),
        (lambda model: vars(model[1])["aux"], "aux"),
        (lambda model: model[1].cache["h"].mean(), "cache"),
        (lambda model: model[1].penalty(), "aux"),
    ], quick=3),
    ids=["attribute", "getattr", "attrgetter", "property", "vars", "dict", "method"],
)  # fmt: skip
def test_who_reads_what_a_forward_leaves(term, name):
    """The builder's model has it as it was built: that would be an error of the loss, or another loss in silence."""
    made = _left(term)
    one = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        with pytest.raises(UsageError, match=rf"uses '1\.{name}', which the forward of '1' changes") as caught:
            pipeline.step(one)
        assert "return it" in str(caught.value.hint)
        for use in (lambda: term(MADE[-1]), lambda: setattr(MADE[-1][1], "aux", 0), lambda: copy.deepcopy(MADE[-1][1])):
            with pytest.raises(UsageError, match=r"which the forward of '1' changes|uses 1"):
                use()


@pytest.mark.long
def test_a_loss_that_holds_what_a_forward_leaves():
    """A dict at the top of its file is no module, which could tell."""
    with pytest.raises(MarkingError, match=r"the loss reads .*FEATURES.*, which the forward of '1' changes") as caught:
        partition_graph(_left(lambda _: FEATURES["hidden"].mean()))
    assert "return it" in str(caught.value.hint)


@pytest.mark.long
def test_a_loss_that_holds_the_model_for_something_else():
    """What it reads counts, and no name in its code: that of another object, or of a module without such a value."""
    made = _left(lambda model: len(model) * getattr(model[0], "aux", 0) + len({"aux": 1, "cache": 2}))
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert [each.__class__ for each in MADE[-1]] == [nn.Linear, Keeping, nn.Linear]


class Attending(nn.Linear):
    """Leaves something in evaluations alone."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen = None

    def forward(self, x):
        made = super().forward(x)
        if not self.training:
            self.seen = made.detach()
        return made


@pytest.mark.long
def test_what_evaluations_alone_leave():
    """They are captured for themselves, when the first comes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attending(), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "*")
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert model[1].seen is None
        pipeline.evaluate(made.make_batch(8, 0))
        with pytest.raises(UsageError, match=r"uses '1\.seen', which the forward of '1' changes"):
            model[1].seen.sum()


class Registered(nn.Linear):
    """Has its heirs listed, each by its own name, and lets nobody set what it has not made."""

    heirs: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str) -> None:
        assert key not in Registered.heirs
        Registered.heirs.append(key)


class Heir(Registered, key="heir"):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = Counter()

    def forward(self, x):
        self.calls["all"] += 1
        return super().forward(x)

    def train(self, mode=True):
        return super(self.__class__, self).train(mode)

    def __setattr__(self, name, value):
        assert name != "__class__"
        super().__setattr__(name, value)


def test_a_class_with_ways_of_its_own():
    """Is not disturbed by the look at what it tells; with the trained weights it tells the script again."""
    model = nn.Sequential(Heir(), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "*")
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(UsageError, match=r"uses '0\.calls'"):
            model[0].calls.clear()
        model.load_state_dict(pipeline.full_state_dict())
    model(made.make_batch(8, 0)[0])
    assert model[0].calls == {"all": 1}
    assert copy.deepcopy(model)[0].calls == {"all": 1}
    assert pickle.loads(pickle.dumps(model))[0].calls == {"all": 1}
    assert Registered.heirs == ["heir"]


class Narrowed(nn.Linear):
    """As many columns as values say."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x)[:, : 1 + int((x > 0).sum()) % 3]


@pytest.mark.long
def test_a_size_that_decides_is_no_value():
    """Where code between partitions compares sizes, the error names the partition whose result has such a size."""

    def forward(s, x):
        h = s.d(s.a(x))
        if h.shape[1] < 2:
            h = F.pad(h, (0, 1))
        return s.c(s.b(F.pad(h, (0, WIDTH))[:, :WIDTH]))

    with pytest.raises(
        MarkingError, match=r"\(if h.shape.*\): a size of what 'd' returns, which depends on values, dec"
    ):
        partition_graph(of(forward, "a", "b", "c", "d", d=Narrowed))


class Reversed(torch.autograd.Function):
    """Given the layers that it calls, as a Reformer's is."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        del ctx
        return layers[0](h)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        del ctx
        return gradient, None


@pytest.mark.long
def test_a_function_that_is_given_modules():
    """The hint speaks of modules, and of no cache."""

    def forward(s, x):
        return s.c(s.b(Reversed.apply(s.a(x), s.layers)))

    made = of(forward, layers=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH)]))
    with pytest.raises(MarkingError, match="Reversed is given a ModuleList, which is neither") as caught:
        partition_graph(made)
    assert "cache" not in str(caught.value.hint)


class Listed(nn.Module):
    """Holds a layer in a list of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = [nn.Linear(WIDTH, WIDTH)], nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.parts[0](x))


@pytest.mark.long
@pytest.mark.parametrize("marked", [True, False])
def test_a_module_that_is_not_registered_is_named(marked):
    """It has no weights that anybody has: in a marked module, and between partitions."""
    model = (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Listed())) if marked else Listed
    with pytest.raises(MarkingError, match=r"a Linear in .*parts, a list of Python's, is not registered"):
        graph_of(workload(model, *(("0", "1") if marked else ("out",))))


@pytest.mark.parametrize("marks", [("0", "1", "2"), ("0", "2")])
def test_a_tensor_that_is_an_attribute_and_a_buffer_is_named(marks):
    """And not what torch's own modules have by two names, as an LSTM its weights."""

    class First(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.norm(super().forward(x)[0])

    class Named(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.table = torch.ones(WIDTH, dtype=torch.float64)
            self.register_buffer("scale", self.table)

        def forward(self, x):
            return super().forward(x) * self.table

    def model():
        return nn.Sequential(First(), Named(), nn.Linear(WIDTH, 1))

    with pytest.raises(MarkingError, match=r"a tensor in the attribute 1\.table .* has the memory of .* a buffer"):
        graph_of(workload(model, *marks))


def test_no_memory_for_a_capture_is_no_fault_of_the_model() -> None:
    """Nor is the plan then for another one."""

    class Greedy(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    made = workload(lambda: nn.Sequential(Greedy(), nn.Linear(WIDTH, 1)))
    with pytest.raises(MemoryError):
        partition_graph(made)
