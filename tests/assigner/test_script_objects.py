"""What a script's functions hold of a model that they have made before: objects, hooks, the model itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import os
import re
import sys
import types
from random import getstate
from random import random as draw
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from workloads import WIDTH, make_plan, workload

from assigner import Pipeline, Workload
from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.model.marking.cut import recut
from assigner.model.workload import call_arguments
from assigner.runtime.keptmodel import KeptModel, MovedTensors

if TYPE_CHECKING:
    from pathlib import Path

STEPS, MICRO_BATCHES = 2, 2


class Meter:
    """Counts, as a method, as an object that is called, or by a forward."""

    def __init__(self) -> None:
        self.count, self.rate, self.rows = 0, 1.0, list[int]()

    def __call__(self, *_: Any) -> None:
        self.count += 1

    def hook(self, *_: Any) -> None:
        """As a hook."""
        self.rows.append(self.count)


class Part(nn.Linear):
    """Counts in what it was given."""

    def __init__(self, meter: Meter, rows: list[int]) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.meter, self.rows = meter, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.count += 1
        self.rows.append(len(x))
        return super().forward(x) * self.meter.rate


class Net(nn.Module):
    """Two parts."""

    def __init__(self, meter: Meter, rows: list[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(meter, rows), nn.Linear(WIDTH, 1, dtype=torch.float64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def made_of(model: nn.Module) -> Workload:
    """Of a model that is there already: nothing but the function that calls this names what it holds."""
    return workload(lambda: model, "parts.*")


def pipeline_of(made: Workload) -> Pipeline:
    return Pipeline(made, make_plan(made, micro_batches=MICRO_BATCHES))


@pytest.mark.long
def test_what_a_part_was_given_stays_the_callers() -> None:
    """Its counts and its list are those that the caller has, and what the caller sets is read."""
    meter, rows = Meter(), list[int]()
    made = made_of(Net(meter, rows))
    with pipeline_of(made) as pipeline:
        losses = [pipeline.step(made.make_batch(8, 0), update=False) for _ in range(STEPS)]
        assert (meter.count, rows) == (STEPS * MICRO_BATCHES, [4] * STEPS * MICRO_BATCHES)
        meter.rate = 0.5
        assert pipeline.step(made.make_batch(8, 0), update=False) != losses[-1]


@pytest.mark.long
def test_hooks_keep_what_the_caller_reads() -> None:
    """Objects, bound methods, and partials."""
    called, bound, store = Meter(), Meter(), dict[str, int]()
    model = Net(Meter(), [])
    model.parts[0].register_forward_hook(called)
    model.parts[0].register_forward_hook(bound.hook)
    model.parts[1].register_forward_hook(functools.partial(lambda store, *_: store.update(there=1), store))
    made = made_of(model)
    with pipeline_of(made) as pipeline:
        for _ in range(STEPS):
            pipeline.step(made.make_batch(8, 0))
    assert (called.count, len(bound.rows), store) == (STEPS * MICRO_BATCHES, STEPS * MICRO_BATCHES, {"there": 1})


@pytest.mark.long
def test_a_list_of_modules_is_the_models_own() -> None:
    """Although the caller has it too: each partition runs its copies."""

    class Listed(nn.Module):
        def __init__(self, parts: list[nn.Module]) -> None:
            super().__init__()
            self.parts, self.order = nn.ModuleList(parts), parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.order:
                x = part(x)
            return x

    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, 1, dtype=torch.float64)]
    made = made_of(Listed(parts))
    with pipeline_of(made) as pipeline:
        first, second = (pipeline.step(made.make_batch(8, 0)) for _ in range(STEPS))
    assert second < first


def test_a_loss_reads_the_memory_of_a_weight() -> None:
    """By an alias from before, which has the values that the builder gave: refused, until they are loaded."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()
    kept = [model[1].weight.data, model[1].bias.detach()[:1]]

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean() * (1 + kept[0].norm()) + kept[1].sum()

    made = workload(lambda: model, "0", "1", loss=loss)
    batch = made.make_batch(8, 0)
    with pipeline_of(made) as pipeline:
        with pytest.raises(UsageError, match=r"the script uses 1\.weight of the model .* stays as it was built"):
            pipeline.step(batch)
        model.load_state_dict(pipeline.full_state_dict())  # type: ignore[arg-type]
        reference = made.compute_loss(model(batch[0]), batch[1]).item()
        assert pipeline.step(batch) == pytest.approx(reference, rel=0, abs=1e-12)


@pytest.mark.long
def test_a_model_may_be_loaded_with_what_is_trained_after_each_step() -> None:
    """To evaluate it; other values, and what the script then changes, are refused."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "0", "1")
    x, y = made.make_batch(8, 0)
    with pipeline_of(made) as pipeline:
        for _ in range(STEPS):
            pipeline.step((x, y))
            model.load_state_dict(pipeline.full_state_dict())  # type: ignore[arg-type]
            assert torch.equal(pipeline.forward(x), model(x).detach())
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        with pytest.raises(UsageError, match="the script has changed a weight"):
            pipeline.step((x, y))


HELD = {
    name: torch.ones(1, dtype=torch.float64)
    for name in ("value", "listed", "partial", "hook", "slot", "unsaved", "lent", "data", "between")
}
ARRAY, BUILT_IN = HELD["lent"].numpy(), np.ones(1)


class Slotted:
    """Has a tensor without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def times(value: torch.Tensor, _module: nn.Module, _given: Any, y: torch.Tensor) -> torch.Tensor:
    """A hook."""
    return y * value


class Holding(nn.Linear):
    """Has the script's tensors in many ways."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.value, self.listed, self.slot = HELD["value"], [HELD["listed"]], Slotted(HELD["slot"])
        self.partial = functools.partial(torch.mul, HELD["partial"])
        self.register_forward_hook(functools.partial(times, HELD["hook"]))
        self.register_buffer("unsaved", HELD["unsaved"], persistent=False)
        self.lent, self.data, self.built = HELD["lent"], HELD["data"], torch.from_numpy(BUILT_IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.partial(super().forward(x)) * self.value * self.listed[0] * self.slot.value
        return y * self.unsaved * self.lent * self.data * self.built


class Between(nn.Sequential):
    """Reads one itself."""

    def __init__(self) -> None:
        super().__init__(Holding(), nn.Linear(WIDTH, 1))
        self.between = HELD["between"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x) * self.between)


def test_a_tensor_of_the_scripts_is_not_stale_in_partitions() -> None:
    """They have copies of it, wherever a module holds it; what code between them reads is the tensor itself."""
    graph = partition_graph(workload(Between, "0", "1"))
    cpu = torch.device("cpu")

    def check(on: torch.device, change: Any) -> None:
        kept = KeptModel(graph, on)
        MovedTensors(graph)
        for training in (True, False):
            kept.check(dict, training=training)
        change()
        kept.check(dict, training=True)

    changes = {f"0.{name}": HELD[name].zero_ for name in ("value", "unsaved")} | {
        "0.listed[0]": HELD["listed"].zero_,
        "0.partial.args[0]": HELD["partial"].zero_,
        "a hook of 0.args[0]": HELD["hook"].zero_,
        "0.slot.value": HELD["slot"].zero_,
        "0.lent": lambda: ARRAY.fill(0.0),
        "0.data": HELD["data"].data.zero_,
        "the array that is the memory of": lambda: BUILT_IN.fill(0.0),
    }
    for name, change in changes.items():
        with pytest.raises(UsageError, match=f"the script has changed {re.escape(name)}"):
            check(cpu, change)
    check(cpu, HELD["value"].zero_)  # to what it was
    check(cpu, HELD["between"].zero_)
    with pytest.raises(UsageError, match=r"the script has changed Between\.between"):
        check(torch.device("cuda"), lambda: HELD["between"].fill_(2.0))


class Moving(nn.Linear):
    """Has an average of its own, and a teacher that nobody trains."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
            self.teacher.weight.lerp_(self.weight, 0.1)
        return y * self.table


@pytest.mark.long
def test_what_a_forward_has_moved_is_not_read_as_it_was_built() -> None:
    """Buffers, and weights that nobody trains; what stays may be read, before the first step all."""
    model = nn.Sequential(Moving(), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "0", "1")
    first: Any = model[0]
    with pipeline_of(made) as pipeline:
        assert not first.mean.any()
        pipeline.step(made.make_batch(8, 0))
        assert first.table.all()
        for tensor in (first.mean, first.teacher.weight):
            with pytest.raises(UsageError, match=r"the script uses 0\.\w+.* of the model"):
                tensor.sum()
        model.load_state_dict(pipeline.full_state_dict())  # type: ignore[arg-type]
        assert first.mean.any()


class Ranged(nn.Linear):
    """Divides by a range of which it keeps track; and has a mask that it makes anew."""

    def __init__(self, how: str, *, persistent: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how
        self.register_buffer("range", torch.ones(WIDTH), persistent=persistent)
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones_like(self.mask)
        if self.training and self.how == "written":
            self.range.lerp_(x.detach().abs().amax(0), 0.5)
        elif self.training and self.how == "by data":
            self.range.data.lerp_(x.detach().abs().amax(0), 0.5)
        elif self.training:
            self.range = self.range.lerp(x.detach().abs().amax(0), 0.5)
        return super().forward(x) / self.range * self.mask


@pytest.mark.slow
@pytest.mark.parametrize("how", ["written", "by data", "assigned"])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_no_state_dict_has_is_not_the_scripts_again(how: str, *, persistent: bool) -> None:
    """A buffer that forwards move is loaded with the weights, or is refused: it would be as it was built."""
    model = nn.Sequential(Ranged(how, persistent=persistent), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "0", "1")
    x, _ = made.make_batch(8, 1)
    with pipeline_of(made) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(UsageError, match=r"the script uses 0\.range"):
            model[0].range.sum()  # type: ignore[operator, union-attr]
        expected = pipeline.forward(x)
        model.load_state_dict(pipeline.full_state_dict())  # type: ignore[arg-type]
        model.eval()
        if persistent:
            assert torch.equal(model(x), expected)
        else:
            with pytest.raises(UsageError, match=r"the script uses 0\.range") as caught:
                model(x)
            assert "as persistent" in str(caught.value.hint)


class Showing(nn.Linear):
    """Keeps its last output, for a picture."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.last = y.detach()
        return y


@pytest.mark.slow
def test_a_model_that_keeps_something_is_called_as_a_copy() -> None:
    """What its own forward leaves is a change of a module; the hint says how to evaluate."""
    model = nn.Sequential(Showing(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "0", "1")
    x, _ = made.make_batch(8, 1)
    with pipeline_of(made) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        expected = pipeline.forward(x)
        model.load_state_dict(pipeline.full_state_dict())  # type: ignore[arg-type]
        assert torch.equal(copy.deepcopy(model)(x), expected)
        pipeline.step(made.make_batch(8, 1))
        for use, words, hint in (
            (model.eval, r"changed Sequential\.training", "train() before"),
            (lambda: model.train()(x), r"changed 0\.last", "copy.deepcopy"),
        ):
            use()
            with pytest.raises(UsageError, match=words) as caught:
                pipeline._kept.check(pipeline.state_dict, training=True)
            assert hint in str(caught.value.hint)


@pytest.mark.long
def test_a_second_pipeline_begins_with_what_is_loaded() -> None:
    """Not in silence with what the model was built with."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()
    made = workload(lambda: model, "0", "1")
    batch = made.make_batch(8, 0)
    with pipeline_of(made) as first:
        first.step(batch)
        trained, state = first.evaluate(batch), first.full_state_dict()
    with pipeline_of(made) as second:
        with pytest.raises(UsageError, match="another pipeline has trained the model"):
            second.evaluate(batch)
        second.load_state_dict(state)
        assert second.evaluate(batch) == trained
    model.load_state_dict(state)  # type: ignore[arg-type]
    with pipeline_of(made) as third:
        assert third.evaluate(batch) == trained


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_no_debugger_opens_in_a_capture(*, always: bool) -> None:
    """It would wait without a word, also on a way that no values go."""

    class Stops(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if always or torch.isnan(y).any():
                breakpoint()
            return y

    made = workload(lambda: nn.Sequential(Stops(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "0", "1")
    if not always:
        partition_graph(made)
        return
    with pytest.raises(MarkingError, match="opens a debugger"):
        partition_graph(made)


def counting() -> Any:
    """A function that counts its calls by itself."""
    calls = 0

    def rate() -> float:
        nonlocal calls
        calls += 1
        return 1.0 / calls

    return rate


RATE = counting()


@pytest.mark.long
def test_a_function_at_the_top_of_the_file_counts_its_calls() -> None:
    """Between partitions: the graph would have the first count for ever."""

    class Root(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * RATE()

    with pytest.raises(MarkingError, match="changes calls outside its partitions"):
        partition_graph(workload(lambda: Root(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "0", "1"))


class Flagged(nn.Module):
    """It sets a flag in its first forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.ready = way, False
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.a.register_forward_hook((lambda *_: [None][0 * self.ready]) if way == "reached" else lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "used" and self.ready:
            x = x * 2
        if self.way == "by shape":
            self.ready = self.ready or x.dim() > 2
        elif not self.ready:
            self.ready = True
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("way", "said"), [("flag", ""), ("used", "changes Flagged.ready"), ("reached", "changes Flagged.ready")]
)
def test_a_flag_that_the_first_forward_sets(way: str, said: str) -> None:
    """It is let through where the second call does the same, and no partition can read it."""
    made = workload(lambda: Flagged(way), "a", "b")
    with pytest.raises(MarkingError, match=said) if said else contextlib.nullcontext():
        graph = partition_graph(made)
        assert not graph.deferred.model.ready


def test_a_flag_that_other_shapes_set() -> None:
    """Its graph would go on as if they had never been there."""
    made = workload(lambda: Flagged("by shape"), "a", "b")
    graph = partition_graph(made)
    leaves, structure = pytree.tree_flatten(call_arguments(torch.zeros(4, 3, WIDTH)))
    with pytest.raises(MarkingError, match=r"sets Flagged\.ready outside its partitions to another value"):
        recut(graph, structure, leaves, training=True)


class Filling(nn.Linear):
    """It writes into what it is given."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if kept is None else x + kept.add_(x.detach().mean(0)))


class Keeping(nn.Module):
    """It keeps something for its next call that seems to follow from shapes alone, or from nothing."""

    kept: torch.Tensor | None = None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.ready = way, False
        self.a, self.b = Filling(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def flag(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.mean() * (2 if self.ready else 1)
        self.ready = True
        return self.a(x * scale)

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            with torch.no_grad():
                self.kept = torch.rand(WIDTH, dtype=x.dtype)
        return self.a(x * self.kept)

    def listed(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.zeros(WIDTH, dtype=x.dtype)
            torch._foreach_add_([self.kept], [x.detach().mean(0)])
        return self.a(x * self.kept)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.zeros(WIDTH, dtype=x.dtype)
        return self.a(x, self.kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(getattr(self, self.way)(x))


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize(("way", "changed"), [("flag", "ready"), ("drawn", "kept")])
def test_what_code_without_gradient_keeps_is_looked_at(way: str, changed: str) -> None:
    """A flag that it reads, and what it draws once: the graph would do the same for ever, and draw anew."""
    with pytest.raises(MarkingError, match=f"changes Keeping.{changed} outside its partitions"):
        partition_graph(workload(lambda: Keeping(way), "a", "b"))


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize("way", ["listed", "given"])
def test_what_is_written_into_a_kept_tensor_counts(way: str) -> None:
    """Also as one of a list, or by a partition: the graph would begin with zeros each time."""
    with pytest.raises(MarkingError, match=r"changes Keeping\.kept outside its partitions"):
        partition_graph(workload(lambda: Keeping(way), "a", "b"))


class Noting(nn.Module):
    """It keeps its mode and the inputs' shape; one reads the former in training, the other in longer inputs alone."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.phase, self.size = reads, "", None
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (self.reads == "in training" and self.training) or (self.reads == "when longer" and x.dim() > 2):
            x = x * (2 if self.phase == "eval" else 1)
        self.phase, self.size = "train" if self.training else "eval", x.dim()
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("reads", "refused"), [("never", None), ("in training", "in eval mode"), ("when longer", "longer")]
)
def test_a_note_that_differs_between_captures(reads: str, refused: str | None) -> None:
    """Is let through if no forward reads it, whichever is captured first."""
    graph = partition_graph(workload(lambda: Noting(reads), "a", "b"))
    for what, rows, training in [("in eval mode", (4,), False), ("longer", (4, 3), True)]:
        leaves, structure = pytree.tree_flatten(call_arguments(torch.zeros(*rows, WIDTH)))
        with (
            pytest.raises(MarkingError, match=r"sets Noting\.phase outside its partitions to another value")
            if what == refused
            else contextlib.nullcontext()
        ):
            recut(graph, structure, leaves, training=training)


class BaseConfig:
    """Whose attribute a class has."""

    scale = 1.0


class Config(BaseConfig):
    """With a class in it, and its own objects."""

    class Inner:
        """Of it."""

        scale = 1.0

    _made: Any = None

    def __init__(self) -> None:
        self.own = 1.0


class Single(type):
    """Makes one object of each class."""

    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls) -> Any:
        if cls not in Single.made:
            Single.made[cls] = super().__call__()
        return Single.made[cls]


class Only(metaclass=Single):
    """Of which there is one."""

    def __init__(self) -> None:
        self.scale = 1.0


class Schedule:
    """Reads a number of its file."""

    def value(self) -> float:
        """That."""
        return FACTOR


@functools.lru_cache
def config() -> Config:
    """The one."""
    return Config()


def scaling(scale: float = 1.0, *, times: float = 1.0) -> float:
    """A number that can be changed in three places."""
    return scale * times * scaling.by


scaling.by = 1.0  # type: ignore[attr-defined]
scaling.calls = 0  # type: ignore[attr-defined]
FACTOR = 1.0
SETTINGS = types.ModuleType("settings_of_a_script")
SETTINGS.scale = 1.0  # type: ignore[attr-defined]
PRIOR = torch.distributions.Normal(0.0, 1.0)
ARGUMENTS = types.SimpleNamespace(scale=1.0, epoch=0)
READS: dict[str, tuple[Any, Any]] = {
    "a Python module": (lambda: SETTINGS.scale, lambda: setattr(SETTINGS, "scale", 2.0)),
    "a class in a class": (lambda: Config.Inner.scale, lambda: setattr(Config.Inner, "scale", 2.0)),
    "a class above": (lambda: Config.scale, lambda: setattr(BaseConfig, "scale", 2.0)),
    "a helper's method": (lambda: Schedule().value(), lambda: setattr(sys.modules[__name__], "FACTOR", 2.0)),
    "a cached function": (lambda: config().own, lambda: setattr(config(), "own", 2.0)),
    "a metaclass": (lambda: Only().scale, lambda: setattr(Only(), "scale", 2.0)),
    "a distribution": (PRIOR.entropy, lambda: setattr(PRIOR, "scale", torch.tensor(2.0))),
    "the state of Python's generator": (lambda: getstate()[1][0] % 3, draw),
    "a namespace": (lambda: ARGUMENTS.scale, lambda: setattr(ARGUMENTS, "scale", 2.0)),
    "a function's attribute": (lambda: scaling.by, lambda: setattr(scaling, "by", 2.0)),
    "a default": (scaling, lambda: setattr(scaling, "__defaults__", (2.0,))),
    "a keyword's default": (scaling, lambda: scaling.__kwdefaults__.update(times=2.0)),
    "a function of torch's": (
        lambda: nn.functional.softsign(torch.ones(())),
        lambda: setattr(nn.functional, "softsign", torch.sigmoid),
    ),
    "a function of Python's": (lambda: math.sqrt(2.0), lambda: setattr(math, "sqrt", math.cos)),
    "a method of tensors": (lambda: torch.ones(()).sgn(), lambda: setattr(torch.Tensor, "sgn", torch.Tensor.cos)),
    "the environment": (lambda: float(os.environ["A_SCALE"]), lambda: os.environ.update(A_SCALE="2.0")),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", READS)
def test_what_code_between_partitions_reads_may_not_change(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: the run would go on with the old value."""
    for each, name in ((SETTINGS, "scale"), (Config.Inner, "scale"), (BaseConfig, "scale"), (ARGUMENTS, "scale")):
        monkeypatch.setattr(each, name, 1.0)
    for each, name in ((nn.functional, "softsign"), (math, "sqrt"), (torch.Tensor, "sgn")):
        monkeypatch.setattr(each, name, getattr(each, name))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0)
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setattr(scaling, "by", 1.0)
    monkeypatch.setattr(scaling, "__defaults__", (1.0,))
    monkeypatch.setitem(scaling.__kwdefaults__, "times", 1.0)
    monkeypatch.setenv("A_SCALE", "1.0")
    monkeypatch.setenv("ANOTHER", "1.0")
    monkeypatch.setattr(PRIOR, "scale", torch.tensor(1.0))
    config().own = Only().scale = 1.0
    read, change = READS[where]

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)) * read()

    graph = partition_graph(workload(Root, "first", "last"))
    ARGUMENTS.epoch += 1  # nothing reads them
    os.environ["ANOTHER"] = "2.0"
    scaling.calls += 1  # type: ignore[attr-defined]
    graph.check_read()
    change()
    with pytest.raises(UsageError, match="has changed since the model was captured"):
        graph.check_read()


def test_the_name_of_a_draw_is_no_state() -> None:
    """`random` of `from random import random` is a method of the generator that the whole process draws from."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.rate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * (draw() if self.rate > 0 else 1.0))

    graph = partition_graph(workload(Root, "first", "last"))
    draw()
    graph.check_read()
    graph.deferred.model.rate = 1.0
    with pytest.raises(UsageError, match="rate has changed"):
        graph.check_read()


def found_of(x: Any) -> Any:
    """In whose place is another file's function."""


FOUND = (
    "KNOWN = {}\ndef found(x):\n    if type(x) not in KNOWN:\n        KNOWN[type(x)] = 1.0\n    return KNOWN[type(x)]\n"
)
ASKED = "def asked(x):\n    return KNOWN.get(type(x), 3.0)\n"


@pytest.mark.slow
@pytest.mark.parametrize(("function", "key", "value", "same"), [
    ("found", torch.Tensor, 1.0, True), ("found", torch.Tensor, 2.0, False), ("found", "a", 1.0, False),
    ("asked", torch.Tensor, 1.0, False),
])  # fmt: skip
def test_what_a_file_finds_out_for_each_class_of_tensors_is_found_again(
    function: str, key: Any, value: float, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As einops does; a script's own entries, and what some code reads and does not find out, are other values."""
    name = f"known_by_class_{function}_{key!s:.1}_{value:.0f}"
    (tmp_path / f"{name}.py").write_text(FOUND + ASKED)
    monkeypatch.syspath_prepend(tmp_path)
    file = importlib.import_module(name)
    monkeypatch.setattr(sys.modules[__name__], "found_of", getattr(file, function))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x * found_of(x))

    graph = partition_graph(workload(Root, "first", "last"))
    graph.check_read()
    file.KNOWN[key] = value
    if same:
        graph.check_read()
    else:
        with pytest.raises(UsageError, match="has changed since the model was captured"):
            graph.check_read()
