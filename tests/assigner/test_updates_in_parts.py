"""Optimizers that take lists of tensors update one partition after the other: the same update in less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from workloads import Reference, make_plan, pipeline_of, skips

from assigner.profiler.memory import peak_bytes
from assigner.runtime.update.separability import step_in_parts

KINDS: list[Any] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}), (optim.AdamW, {"lr": 0.1, "maximize": True}),
    (optim.Adamax, {}), (optim.NAdam, {"momentum_decay": 0.1}), (optim.RAdam, {}), (optim.ASGD, {}), (optim.Rprop, {}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}), (optim.Adagrad, {}), (optim.Adadelta, {}),
    (optim.Adafactor, {}),
]  # fmt: skip


def parameters() -> list[nn.Parameter]:
    """Six, of three sizes."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8 * n, 16)) for n in (1, 2, 3, 1, 2, 3)]


def set_gradients(every: list[nn.Parameter], step: int) -> None:
    """All but one have some; which one that is changes."""
    torch.manual_seed(step)
    for n, each in enumerate(every):
        each.grad = None if n == step % 6 else torch.randn_like(each)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_parts_make_the_update_of_the_whole(kind: Any, settings: dict[str, Any]) -> None:
    """To the bit, for each of torch's that takes lists; with a parameter in two parts, one in none, and two groups."""
    whole, divided = parameters(), parameters()
    one, other = (
        kind([{"params": each[:3]}, {"params": each[3:], "lr": 0.01}], foreach=True, **settings)
        for each in (whole, divided)
    )
    for step in range(8):
        set_gradients(whole, step)
        set_gradients(divided, step)
        one.step()
        gradients = [each.grad for each in divided]
        step_in_parts(other, [divided[:2], divided[1:4], [], divided[4:5]])
        assert all(a is b for a, b in zip(gradients, (each.grad for each in divided), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(whole, divided, strict=True))


def test_what_takes_no_lists_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not torch's own, or has a hook on its step."""
    every = parameters()

    class Own(optim.SGD):
        """A user's class."""

    hooked = optim.SGD(every, lr=0.1, foreach=True)
    found: list[int] = []
    hooked.register_step_post_hook(lambda *_: found.append(1))
    for made in (optim.SGD(every, lr=0.1), optim.Adam(every, fused=True), Own(every, lr=0.1, foreach=True)):
        plain = made.step
        monkeypatch.setattr(type(made), "step", lambda *_, plain=plain: found.append(1) or plain())
        set_gradients(every, 0)
        step_in_parts(made, [every[:3], every[3:]])
        monkeypatch.undo()
    set_gradients(every, 0)
    step_in_parts(hooked, [every[:3], every[3:]])
    assert len(found) == 4


def test_temporaries_are_those_of_the_largest_part() -> None:
    """Torch's Adam makes a list of roots as large as all that it updates."""
    every = [nn.Parameter(torch.randn(64, 1024)) for _ in range(8)]
    adam = optim.Adam(every, foreach=True)
    set_gradients(every, 99)
    adam.step()  # its state is there
    whole = peak_bytes(adam.step, torch.device("cpu"))
    divided = peak_bytes(lambda: step_in_parts(adam, ([each] for each in every)), torch.device("cpu"))
    assert divided <= whole / 4


def test_a_pipeline_updates_its_partitions_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the optimizer finds the gradients of one partition; the training is the plain one."""
    made = replace(skips(), optimizer=lambda every: optim.AdamW(every, lr=0.01, foreach=True))
    reference, seen = Reference(made), []
    plain = optim.AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        seen.append({id(each) for group in self.param_groups for each in group["params"] if each.grad is not None})
        return plain(self, closure)

    expected = [reference.step(made.make_batch(8, n)) for n in range(3)]
    with pipeline_of(made, make_plan(made)) as pipeline:
        monkeypatch.setattr(optim.AdamW, "step", step)
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(3)]
        runners = pipeline._installed.executor.runners.values()
        parts = [{id(each) for each in runner.module.parameters()} for runner in runners]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert seen == [each for each in parts if each] * 3
