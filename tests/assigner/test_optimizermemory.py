"""What an optimizer of the user's keeps beside the state of its parameters."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn, optim

from assigner.errors import UsageError
from assigner.runtime.update.optimizermemory import OptimizerMemory, outside_of


class Own(optim.SGD):
    """Has what a test gives it, and changes it in a step."""

    def __init__(self, parameters: Any, start: Any, change: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.every = list(self.param_groups[0]["params"])
        self.change = change
        start(self)

    def step(self, closure: Any = None) -> Any:
        self.change(self)
        return super().step(closure)


class Told(Own):
    """Its state_dict has a count."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}  # type: ignore[attr-defined]


class Same(Own):
    """Its state_dict is torch's, said anew."""

    def state_dict(self) -> Any:
        return dict(super().state_dict())


def stepped(kind: Any, start: Any, change: Any) -> OptimizerMemory:
    """Of an optimizer that has made two steps."""
    weight = nn.Parameter(torch.ones(3))
    build = functools.partial(kind, start=start, change=change)
    outside = outside_of(build)
    optimizer = build([weight])
    memory = OptimizerMemory(optimizer, build, outside)
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    return memory


def count(optimizer: Any) -> None:
    """In an attribute."""
    optimizer.count = getattr(optimizer, "count", 0) + 1


def keyed(optimizer: Any) -> None:
    """In its state, by a name."""
    optimizer.state["count"] = 1


def inner(optimizer: Any) -> None:
    """An optimizer inside of it."""
    optimizer.inner = optim.Adam(optimizer.every)


def hooked(optimizer: Any) -> None:
    """What a hook on its step closes over, of parameters and of the optimizer too, grows."""
    seen, every = list[float](), {"all": optimizer.every}
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(every) + len(optimizer.param_groups)))


def scheduled(optimizer: Any) -> None:
    """A hook on its step steps a scheduler of torch's, which keeps a count."""
    rates = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: rates.step())


def once(optimizer: Any) -> None:
    """A hook on its step that takes itself out."""
    handle = optimizer.register_step_pre_hook(lambda *_: handle.remove())


LOG: list[int] = []


def logged(optimizer: Any) -> None:
    """A hook on its step notes something where the builder finds it again."""
    optimizer.register_step_pre_hook(lambda *_: LOG.append(1))


HELD: dict[str, Any] = {}


def held(optimizer: Any) -> None:
    """A hook on its step notes something that is made with it, and that the builder keeps."""
    HELD["seen"] = seen = list[int]()
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))


def kept_scheduler(optimizer: Any) -> None:
    """The builder keeps a scheduler for the script."""
    HELD["rates"] = optim.lr_scheduler.StepLR(optimizer, 1)
    HELD["optimizer"], HELD["every"] = optimizer, [*optimizer.every]


def own_step(optimizer: Any) -> None:
    """It calls something that counts what it is called."""
    seen = list[int]()
    optimizer.called = lambda: seen.append(1)


def nothing(_: Any) -> None:
    """Keeps nothing."""


class Warmup:
    """Counts its calls."""

    count = 0

    def __call__(self):
        self.count += 1
        return min(1.0, self.count / 10)


LISTED = (lambda o: setattr(o, "seen", []), lambda o: o.seen.append(1))
TENSOR = (lambda o: setattr(o, "t", torch.zeros(())), lambda o: o.t.add_(1))
GROUPED = (lambda o: o.param_groups[0].update(seen=[]), lambda o: o.param_groups[0]["seen"].append(1))
QUEUED = (lambda o: o.param_groups[0].update(seen=deque()), lambda o: o.param_groups[0]["seen"].append(1))
CALLED = (lambda o: o.param_groups[0].update(rate=Warmup()), lambda o: o.param_groups[0]["rate"]())
UNUSED = (lambda o: o.param_groups[0].update(rate=Warmup(), decay=lambda n: n / 2), nothing)
DEFAULT = (lambda o: o.defaults.update(seen=[]), lambda o: o.defaults["seen"].append(1))
RATE = (lambda o: o.param_groups[0].update(lr=torch.tensor(0.1)), lambda o: o.param_groups[0]["lr"].mul_(0.5))
GROUPED_PARAMETERS = (lambda o: setattr(o, "by_name", {"all": o.every}), nothing)
MADE = "something that Workload.optimizer has made with it"
IN_HOOK = "<locals>.<lambda>, hook 1 on its step,"
UNCHANGED = (lambda o: setattr(o, "table", {"a": [1, 2]}), nothing)


@pytest.mark.parametrize(
    ("kind", "how", "moved", "saved"),
    [
        pytest.param(Own, (nothing, nothing), "", "", id="nothing"),
        pytest.param(Own, (nothing, count), "", "", id="a count"),
        pytest.param(Told, (nothing, count), "", "'count' of its own state_dict()", id="a count that it tells"),
        pytest.param(Same, (nothing, count), "", "", id="a state_dict of its own with nothing more"),
        pytest.param(Own, LISTED, "self.seen", "", id="a list"),
        pytest.param(Own, TENSOR, "self.t", "", id="a tensor"),
        pytest.param(Own, GROUPED, "", "param_groups[0]['seen']", id="a list in a group"),
        pytest.param(Own, QUEUED, "param_groups[0]['seen']", "param_groups[0]['seen']", id="a queue in a group"),
        pytest.param(Own, CALLED, "param_groups[0]['rate']", "param_groups[0]['rate']", id="what a group calls"),
        pytest.param(Own, UNUSED, "", "", id="what a group has to call"),
        pytest.param(Own, DEFAULT, "self.defaults['seen']", "", id="a list among its defaults"),
        pytest.param(Own, (hooked, nothing), f"something in hooked.{IN_HOOK}", "", id="a hook's closure"),
        pytest.param(Own, (scheduled, nothing), f"something in scheduled.{IN_HOOK}", "", id="a scheduler in a hook"),
        pytest.param(Own, (once, nothing), f"something in once.{IN_HOOK}", "", id="a hook that is gone"),
        pytest.param(Own, (logged, nothing), "", "", id="a hook's log that the builder has"),
        pytest.param(Own, (held, nothing), f"something in held.{IN_HOOK}", "", id="a hook's log that is made with it"),
        pytest.param(Own, (kept_scheduler, lambda _: HELD["rates"].step()), MADE, "", id="a scheduler that is kept"),
        pytest.param(Own, (kept_scheduler, nothing), "", "", id="a scheduler that is kept and not used"),
        pytest.param(Own, (own_step, lambda o: o.called()), "self.called", "", id="a function's closure"),
        pytest.param(Own, GROUPED_PARAMETERS, "", "", id="parameters in a dict"),
        pytest.param(Own, RATE, "", "", id="a rate that is a tensor"),
        pytest.param(Own, UNCHANGED, "", "", id="a table that stays as it is"),
        pytest.param(Own, (nothing, keyed), "state['count']", "state['count']", id="a name in its state"),
        pytest.param(Own, (inner, nothing), "self.inner", "", id="an optimizer"),
    ],
)
def test_what_is_not_taken_is_refused(kind: Any, how: Any, moved: str, saved: str) -> None:
    """By a move and by a checkpoint, each what it would lose; and nothing else."""
    memory = stepped(kind, *how)
    for check, said in (
        (functools.partial(memory.check_moved, ranks=2), moved),
        (functools.partial(memory.check_saved, is_spread=False), saved),
    ):
        if said:
            with pytest.raises(UsageError) as caught:
                check()
            assert f"keeps {said} beside the state of its parameters" in str(caught.value)
        else:
            check()


def test_torchs_own_are_taken() -> None:
    """Whatever they keep."""
    weight = nn.Parameter(torch.ones(3))
    for made in (optim.Adam([weight], amsgrad=True), optim.LBFGS([weight]), optim.RAdam([weight], lr=0.1)):
        memory = OptimizerMemory(made)
        weight.grad = torch.ones(3)
        made.step(lambda: 1.0)
        memory.check_moved(ranks=2)
        memory.check_saved(is_spread=True)
