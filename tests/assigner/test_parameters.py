"""What hangs on parameters (hooks, attributes, classes, `requires_grad`) holds in a pipeline as in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cutting import of
from torch import nn
from workloads import WIDTH, Reference, graph_of, in_one_buffer, language, make_plan, pipeline_of, workload

from assigner.errors import UsageError

EXACT = 1e-10


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


class Hung(nn.Module):
    """Hooks, attributes and a class on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)
        self.parts[0].scale = Scale(torch.ones(WIDTH))
        self.parts[0].register_forward_hook(lambda module, _, made: made * module.scale)
        limit = 0.01
        self.parts[0].weight.register_hook(lambda gradient: gradient.clamp(-limit, limit))
        self.parts[0].weight.register_hook(lambda gradient: gradient.sign() * gradient.square() * 100)
        self.parts[1].weight.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        self.last.weight.register_hook(_look)
        for name, each in self.named_parameters():
            each.is_bias = name.endswith("bias")
        self.last.weight.lr_scale = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.last(x)


def _look(gradient: torch.Tensor) -> None:
    """A hook that changes nothing."""
    assert gradient.shape == (1, WIDTH)


def by_attributes(parameters: Any) -> torch.optim.Optimizer:
    """Groups by what hangs on parameters."""
    every = list(parameters)
    scales = [each for each in every if isinstance(each, Scale)]
    biases = [each for each in every if each.is_bias]
    slow = [each for each in every if getattr(each, "lr_scale", 1.0) < 1]
    rest = [each for each in every if not any(each is other for other in (*scales, *biases, *slow))]
    groups = [{"params": scales, "lr": 0.5}, {"params": biases, "lr": 0.2}, {"params": slow, "lr": 0.01}]
    return torch.optim.SGD([*groups, {"params": rest}], lr=0.1, momentum=0.9)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_hooks_attributes_and_classes_of_parameters(remat):
    """A hook sees a step's whole gradient once, also under accumulation; groups are made by attributes and classes."""
    made = workload(Hung, "parts.*", "last", optimizer=by_attributes)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
        assert [len(names) for names in pipeline._rank_optimizer.groups.names] == [1, 3, 1, 2]
        for n in range(4):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT
        pipeline.optimizer.zero_grad()
        reference.optimizer.zero_grad()
        for n in range(3):
            reference.loss(made.make_batch(8, n)).backward()
            pipeline.step(made.make_batch(8, n), update=False)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT


@pytest.mark.long
def test_a_hook_on_a_shared_weight_sees_the_sum():
    """The embedding's and the head's gradients are one."""

    def hooked() -> nn.Module:
        model = language().model()
        model.tokens.weight.register_hook(torch.sin)
        return model

    made = replace(language(), model=hooked)
    reference = Reference(made)
    with pipeline_of(
        made, make_plan(made, [(0, ["tokens", "blocks.0"]), (0, ["blocks.1", "blocks.2", "head"])])
    ) as run:
        for n in range(2):
            batch = made.make_batch(8, n)
            assert run.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.gradient_distance(run.gradients()) < EXACT


def test_a_hook_of_the_script_is_one_too():
    """A hook that the loop registers on the pipeline's parameter is called once a step, until it is removed."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, 1)))
    seen: list[int] = []
    with pipeline_of(made, make_plan(made)) as pipeline:
        weight = dict(pipeline.named_parameters())["0.weight"]
        handle = weight.register_hook(lambda gradient: seen.append(1) or gradient * 0)
        pipeline.step(made.make_batch(8, 0))
        assert not weight.grad.any()
        handle.remove()
        pipeline.step(made.make_batch(8, 0))
        assert weight.grad.any()
    assert seen == [1]


def doubled() -> nn.Module:
    """A hook on one of two parameters."""
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def test_gradients_are_added_to_where_they_are():
    """A buffer whose views are the gradients, made before the first step, has them, also of what has a hook."""
    made = workload(doubled)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        buffers = [
            in_one_buffer(reference.model.parameters()),
            in_one_buffer(dict(pipeline.named_parameters()).values()),
        ]
        for n in range(3):
            batch = made.make_batch(8, n)
            loss = reference.loss(batch)
            loss.backward()
            assert pipeline.step(batch, update=False) == pytest.approx(loss.item(), abs=EXACT)
            for buffer, optimizer in zip(buffers, (reference.optimizer, pipeline.optimizer), strict=True):
                buffer.mul_(0.5)
                optimizer.step()
                if n:
                    optimizer.zero_grad(set_to_none=False)
        assert not buffers[1].any()
    assert reference.distance(pipeline.named_parameters()) < EXACT


def test_what_a_hook_keeps_stays():
    """The next step adds to the parameter's gradient, not to what a hook has seen of this one, or given."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, 1)))
    with pipeline_of(made, make_plan(made)) as pipeline:
        weight, bias = dict(pipeline.named_parameters()).values()
        seen: list[torch.Tensor] = []
        given = torch.ones_like(bias)
        weight.register_hook(seen.append)
        bias.register_hook(lambda _: given)
        for _ in range(2):
            pipeline.step(made.make_batch(8, 0), update=False)
        assert torch.equal(*seen)
        assert torch.equal(weight.grad, 2 * seen[0])
        assert torch.equal(given, torch.ones_like(bias))
        assert torch.equal(bias.grad, 2 * given)


def masked() -> nn.Module:
    """A hook with a tensor of the builder's."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    mask = torch.ones(WIDTH, WIDTH)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return model


def late() -> nn.Module:
    """A hook that runs when a gradient has been added."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model[0].weight.register_post_accumulate_grad_hook(print)
    return model


def original() -> nn.Module:
    """An attribute that is a tensor."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model[0].weight.start = model[0].weight.detach().clone()
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (masked, r"a hook on 0\.weight holds a tensor or a module"),
        (late, r"0\.weight has a hook from register_post_accumulate_grad_hook"),
        (original, r"the attribute 'start' of 0\.weight holds a tensor"),
    ],
)
def test_what_cannot_follow_a_parameter(model, words):
    """Hooks and attributes with tensors of the builder's, and hooks on what a micro-batch adds, are refused."""
    with pytest.raises(UsageError, match=words) as caught:
        graph_of(workload(model))
    assert caught.value.hint


def test_what_is_trained_cannot_change():
    """A parameter that was built frozen and that the loop unfreezes is refused at the next step, by its name."""

    def builder() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        model[0].bias.requires_grad_(requires_grad=False)
        return model

    made = workload(builder)
    pipeline = pipeline_of(made, make_plan(made))
    pipeline.step(made.make_batch(8, 0))
    dict(pipeline.named_parameters())["0.bias"].requires_grad_(requires_grad=True)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.bias is True now; the pipeline was made with False"):
        pipeline.step(made.make_batch(8, 0))
    pipeline.close()


def test_code_between_partitions_may_ask_whether_a_parameter_is_trained():
    """Its graph has the answer of the capture: a step or an evaluation with another one is refused."""

    def forward(s, x):
        return s.c(s.b(s.a(x))).sum(1, keepdim=True) * (2.0 if s.b.weight.requires_grad else 1.0)

    made = of(forward)
    batch, reference = made.make_batch(8, 0), Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT
        parameters = dict(pipeline.named_parameters())
        parameters["a.weight"].requires_grad_(requires_grad=False)
        pipeline.step(batch)
        pipeline.evaluate(batch)
        parameters["b.weight"].requires_grad_(requires_grad=False)
        for run in (pipeline.step, pipeline.evaluate):
            with pytest.raises(UsageError, match=r"requires_grad of b\.weight was True when the model was captured"):
                run(batch)


def test_what_is_trained_may_be_frozen_for_a_while():
    """Gradual unfreezing: what was built trainable is trained again when the loop says so."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n in range(4):
            for parameters in (dict(pipeline.named_parameters()), dict(reference.model.named_parameters())):
                for name in ("0.weight", "0.bias"):
                    parameters[name].requires_grad_(requires_grad=n >= 2)
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert set(pipeline.gradients()) == {name for name, each in reference.model.named_parameters()
                                                 if each.grad is not None}  # fmt: skip
        assert reference.distance(pipeline.state_dict().items()) < EXACT


class Turning(nn.Linear):
    """Freezes its bias, or hooks on to its weight, in forward."""

    does = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self).does == "freeze":
            self.bias.requires_grad_(requires_grad=False)
        if type(self).does == "hook":
            self.weight.register_hook(torch.sin)
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("freeze", r"a forward has changed requires_grad of 0\.bias"),
        ("hook", r"a forward registers a hook on 0\.weight"),
    ],
)
def test_a_forward_cannot_change_what_is_trained(monkeypatch, does, words):
    """Nor can a marked module's own forward, nor can it hook on to a weight."""
    made = workload(lambda: nn.Sequential(Turning(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    pipeline = pipeline_of(made, make_plan(made))
    monkeypatch.setattr(Turning, "does", does)
    with pytest.raises(UsageError, match=words):
        pipeline.step(made.make_batch(8, 0))
    pipeline.close()
