"""Modules that the script holds beside a pipeline, whose partitions are copies of them."""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.model.marking import partition_graph

MADE: list[Drop] = []
SETTINGS = ModuleType("settings_of_a_script")
SETTINGS.TABLE = {"scale": 1.0}


class Drop(nn.Module):
    """Is kept by its file."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.p, self.scales, self.table = 0.5, [1.0, 1.0], SETTINGS.TABLE
        MADE[:] = [self]

    def forward(self, x):
        return self.norm(self.inner(x)) * self.p * self.scales[0] * self.table["scale"] * getattr(self, "late", 1.0)


class Other(Drop):
    """Is another class."""


def made():
    return workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Drop(), nn.Linear(WIDTH, 1)), "*")


def told(change):
    """What a step, an evaluation, a forward and a move say of what the loop changes on the module."""
    one, found = made(), []
    with Pipeline(one, make_plan(one, micro_batches=2), graph=partition_graph(one)) as pipeline:
        pipeline.step(one.make_batch(8, 0))
        change(pipeline.graph.deferred.model[1])
        for run in (
            lambda: pipeline.step(one.make_batch(8, 1)),
            lambda: pipeline.evaluate(one.make_batch(8, 1)),
            lambda: pipeline.forward(one.make_batch(8, 1)[0]),
            lambda: pipeline.move(pipeline.plan),
        ):
            try:
                run()
                found.append("")
            except UsageError as error:
                found.append(error.message)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kept: setattr(kept, "p", 0.3), "has changed 1.p, of a module"),
        (lambda kept: setattr(kept, "late", 2.0), "has changed 1.late, of"),
        (lambda kept: setattr(kept, "__class__", Other), "has changed the class of 1, of"),
        (lambda kept: kept.scales.__setitem__(0, 0.5), "has changed 1.scales"),
        (lambda kept: setattr(kept, "inner", nn.Identity()), "has changed 1._modules['inner']"),
        (lambda kept: kept.norm.register_forward_hook(print), "has changed a hook of 1.norm, of"),
        (lambda kept: kept.inner.requires_grad_(requires_grad=False), "has changed a weight, a buffer"),
    ],
)
def test_a_loop_that_changes_modules_which_the_builder_has_kept_is_refused(change, words):
    """Partitions are copies: nothing is lost in silence."""
    assert all(words in each for each in told(change))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda kept: setattr(kept, "p", 1 / 2),
        lambda kept: kept.table.update(scale=1.0),
        lambda kept: [(each.numel(), each.dtype, each.requires_grad) for each in kept.parameters()],
        lambda kept: torch.optim.AdamW(each for each in kept.parameters() if each.ndim > 1),
    ],
)
def test_a_loop_that_leaves_them_as_they_are_goes_on(change):
    """The same value is no change, nor is what they share with the script."""
    assert told(change) == [""] * 4


@pytest.mark.long
@pytest.mark.parametrize("change", [lambda kept: kept.eval(), lambda kept: kept.norm.eval()])
def test_modules_may_be_in_eval_mode_for_an_evaluation_alone(change):
    """As after `eval()` of the model, or of a part of it."""
    found = told(change)
    assert ".training, of a module" in found[0]
    assert found[1:] == [""] * 3


def built_beside(keep):
    """A pipeline whose builder gives something of its model to `keep`; and its workload."""

    def build():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        model.table = torch.ones(WIDTH)
        keep(model)
        return model

    one = workload(build, "*")
    return pipeline_of(one, make_plan(one, micro_batches=2)), one


class Slotted:
    __slots__ = ("model",)


SLOTTED = Slotted()
BY_NAME, BY_MODEL = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "held"),
    [
        (lambda model: setattr(SLOTTED, "model", model), lambda: SLOTTED.model),
        (lambda model: BY_NAME.update(model=model), lambda: BY_NAME["model"]),
        (lambda model: BY_MODEL.__setitem__(model, 1), lambda: [*BY_MODEL][-1]),
    ],
)
def test_it_does_not_matter_what_holds_them(keep, held):
    """An object with slots, or references that do not keep them."""
    pipeline, one = built_beside(keep)
    with pipeline:
        pipeline.step(one.make_batch(8, 0))
        held()[1].p = 0.2
        with pytest.raises(UsageError, match=r"has changed 1\.p"):
            pipeline.step(one.make_batch(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda parameters, _: parameters[0].requires_grad_(requires_grad=False),
        lambda _, table: table.fill_(0.3),
    ],
)
def test_tensors_alone_may_be_held(change):
    """By `list(model.parameters())`, or in another attribute, whose tensor the pipeline has computed anew."""
    kept = []
    pipeline, one = built_beside(lambda model: kept.__setitem__(slice(None), [[*model.parameters()], model.table]))
    with pipeline:
        pipeline.step(one.make_batch(8, 0))
        change(*kept)
        with pytest.raises(UsageError, match=r"a weight, a buffer or a tensor.*") as caught:
            pipeline.step(one.make_batch(8, 0))
        assert "pipeline.named_parameters()" in caught.value.hint


def normed():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()


@pytest.mark.slow
@pytest.mark.parametrize("build", [lambda own: own, copy.deepcopy])
@pytest.mark.parametrize(
    ("use", "asked"),
    [
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "grad"),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1).step(), "grad"),
        (lambda model: [each.data.mul_(0.9) for each in model.parameters()], "data"),
        (lambda model: setattr(model[0].weight, "data", torch.zeros(1)), "data"),
        (lambda model: nn.init.zeros_(model[0].weight), "zero_"),
        (copy.deepcopy, "__deepcopy__"),
        (lambda model: model.state_dict(), "detach"),
        (lambda model: model(torch.ones(2, WIDTH)), "linear"),
        (lambda model: model[0].weight.register_hook(print), "register_hook"),
    ],
)
def test_a_script_that_uses_weights_which_are_not_trained_is_refused(build, use, asked):
    """At once, during the training and behind it: they are those that were built, whatever the pipeline has done."""
    kept, own = [], normed()
    one = workload(lambda: kept.append(build(own)) or kept[-1], "*")
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        model = pipeline.graph.deferred.model
        assert model is kept[0]
        pipeline.step(one.make_batch(8, 0))
        words = rf"the script uses 0\.weight of the model that the builder has made \({asked}\)"
        with pytest.raises(UsageError, match=words) as caught:
            use(model)
        assert "pipeline.full_state_dict()" in caught.value.hint
        pipeline.move(pipeline.plan)
        pipeline.step(one.make_batch(8, 1))
    with pytest.raises(UsageError, match=words):
        use(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(normed().state_dict(), strict=False),
        lambda model: nn.init.zeros_(model[1].scale),
        lambda model: setattr(model[1].scale, "data", model[1].scale.data * 2),
        lambda model: model[1].scale.data.mul_(0.9),
        lambda model: model[1].scale.data.copy_(torch.zeros(WIDTH)),
    ],
)
def test_what_has_values_and_is_changed(change):
    """The next step finds it, through `.data` too. Buffers may be read, but for those that forwards change."""
    model = normed()
    model[1].register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))
    one = workload(lambda: model, "*")
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        assert copy.deepcopy(model[1].scale).tolist() == model[1].scale.data.tolist() == [1.0] * WIDTH
        with pytest.raises(UsageError, match=r"uses 1\.running_mean .* stays as it was built"):
            model[1].running_mean.tolist()
        pipeline.step(one.make_batch(8, 0))
        change(model)
        with pytest.raises(UsageError, match="has changed a weight, a buffer"):
            pipeline.step(one.make_batch(8, 0))


class Scale(nn.Parameter):
    """A class of the script's own."""


def test_a_class_of_the_scripts_own():
    """It stays one, and code that was typed in is a script, too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()
    model.scale = model[0].bias = Scale(torch.ones(WIDTH, dtype=torch.float64))
    typed = compile(
        "def loss(made, wanted): return (made - wanted).square().mean() + model.scale.sum()", "<stdin>", "exec"
    )
    exec(typed, space := {"__name__": "__main__", "model": model})
    one = replace(workload(lambda: model, "*"), loss=space["loss"])
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        assert isinstance(model.scale, Scale)
        with pytest.raises(UsageError, match=r"the script uses (0\.bias|scale) .*sum"):
            pipeline.step(one.make_batch(8, 0))
        model.load_state_dict(pipeline.full_state_dict())
    assert type(model.scale) is Scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "asked"),
    [
        (lambda model: model[1].running_mean.tolist(), "1.running_mean .*tolist"),
        (lambda model: model[0].weight.detach_().copy_(torch.ones(WIDTH, WIDTH)), "0.weight .*detach_"),
        (lambda model: torch.no_grad()(model[0].weight.copy_)(torch.ones(WIDTH, WIDTH)), "0.weight .*copy_"),
        (lambda model: torch._foreach_norm(list(model.parameters())), "0.weight .*_foreach_norm"),
    ],
)
def test_what_has_no_values_tells_so(use, asked):
    """The builder made it where there was no memory: torch's own errors would say nothing of that, or go on."""
    kept = []
    one = workload(lambda: kept.append(normed()) or kept[-1], "*")
    with pipeline_of(one, make_plan(one, micro_batches=1)):
        with pytest.raises(UsageError, match=f"uses {asked}.*has no values") as caught:
            use(kept[0])
        assert "load_state_dict of another such model" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (lambda model, _: set(model[0].parameters()), r"0\.weight .*__hash__"),
        (lambda model, given: [p for _, p in given if p is model[2].weight], "param group 1 .* has no parameter"),
        (lambda model, given: [p for _, p in given if id(p) in {*map(id, model[2].parameters())}], "has no parameter"),
        (lambda model, given: [p for n, p in given if n in dict(model.named_parameters()) and n != "0.bias"], ""),
    ],
)
def test_param_groups_are_chosen_by_name(chosen, words):
    """None of the parameters that are trained is the model's own, which an optimizer of a plain script was given."""
    kept = []

    def optimizer(named_parameters):
        slow = list(chosen(kept[0], named_parameters))
        fast = [each for _, each in named_parameters if all(each is not other for other in slow)]
        return torch.optim.SGD([{"params": fast}, {"params": slow, "lr": 0.01}], lr=0.1)

    one = replace(workload(lambda: kept.append(normed()) or kept[-1], "*"), optimizer=optimizer)
    plan = make_plan(one, micro_batches=1)
    if words:
        with pytest.raises(UsageError, match=words) as caught:
            pipeline_of(one, plan)
        assert "by name" in caught.value.hint
        return
    with pipeline_of(one, plan) as pipeline:
        device = next(kept[0].parameters()).device
        x, targets = one.make_batch(8, 0)
        pipeline.step((x.to(device), targets.to(device)))


def test_a_model_that_has_the_trained_weights_is_the_scripts_again():
    """As after the training, to go on with it in plain torch."""
    model = normed()
    one = workload(lambda: model, "*")
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        pipeline.step(one.make_batch(8, 0))
        x, _ = one.make_batch(8, 1)
        expected = pipeline.forward(x)
        model.load_state_dict(pipeline.full_state_dict())
    model.eval()
    assert torch.equal(model(x), expected)
    copied = copy.deepcopy(model).state_dict(keep_vars=True)
    assert {type(each) for each in copied.values()} == {torch.Tensor, nn.Parameter}
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_a_cached_builder_gives_the_loop_the_model_that_is_watched():
    """The caches of a model's file are emptied for its capture, but for that one."""

    @functools.cache
    def build():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Counted(WIDTH, 1, build))

    one = workload(build, "*")
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        assert build() is pipeline.graph.deferred.model


class Counted(nn.Linear):
    """Leads to what has made it."""

    def __init__(self, inputs, outputs, build):
        super().__init__(inputs, outputs)
        self.build = build


@pytest.mark.long
def test_a_loss_sees_the_builders_model_in_eval_mode_while_an_evaluation_runs():
    """A plain loop calls `eval()` on it."""
    kept = []
    pipeline, one = built_beside(lambda model: kept.__setitem__(slice(None), [model]))
    pipeline.close()

    modes = []

    def loss(out, targets):
        modes.append(kept[0].training)
        return nn.functional.mse_loss(out, targets)

    with pipeline_of(replace(one, loss=loss), pipeline.plan) as pipeline:
        pipeline.step(one.make_batch(8, 0))
        pipeline.evaluate(one.make_batch(8, 0))
        pipeline.step(one.make_batch(8, 0))
    assert modes == [True] * 2 + [False] * 2 + [True] * 2


def test_what_an_imported_file_holds_reaches_the_partitions():
    """It is the script's own object, and no copy."""
    one = made()
    with pipeline_of(one, make_plan(one, micro_batches=1)) as pipeline:
        first = pipeline.forward(one.make_batch(8, 0)[0])
        SETTINGS.TABLE["scale"] = 0.0
        second = pipeline.forward(one.make_batch(8, 0)[0])
        SETTINGS.TABLE["scale"] = 1.0
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_second_pipeline_goes_on_with_what_a_function_of_the_file_has_counted(remat):
    """A default of a function outlives the model, as in plain torch: the first model's calls count in the second."""

    def counted(y, calls=[0]):  # noqa: B006 - as people write it
        calls[0] += 1
        return y / (1 + calls[0] % 5)

    class Counted(nn.Linear):
        def forward(self, x):
            return counted(super().forward(x))

    one = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Counted(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    found, expected = [], []
    for _ in range(2):
        torch.manual_seed(one.seed)
        model = one.model()
        expected += [one.compute_loss(model(one.make_batch(8, n)[0]), one.make_batch(8, n)[1]).item() for n in range(3)]
    counted.__defaults__[0][0] = 0
    for _ in range(2):
        with pipeline_of(one, make_plan(one, micro_batches=1), remat=remat) as pipeline:
            found += [pipeline.step(one.make_batch(8, n), update=False) for n in range(3)]
    assert found == pytest.approx(expected)


class Told(nn.Linear):
    """Keeps a count beside its weights, which its state has."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_the_state_has_what_forwards_have_left():
    """The model's own code reads and sets it for the pipeline."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Told(), nn.Linear(WIDTH, 1)).double()
    one = workload(lambda: model, "*")
    with pipeline_of(one, make_plan(one, micro_batches=2)) as pipeline:
        pipeline.step(one.make_batch(8, 0))
        state = pipeline.full_state_dict()
        assert state["1._extra_state"] == {"calls": 2}
        pipeline.step(one.make_batch(8, 0))
        pipeline.load_state_dict(state)
        assert pipeline.full_state_dict()["1._extra_state"] == {"calls": 2}
        model.load_state_dict(state)
    assert model[1].calls == 2
