"""Models whose state_dict is more than their parameters and buffers by name, and what training them needs."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from workloads import WIDTH, Language, graph_of, next_token, tokens, workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.model.workload import Workload


class Counter(nn.Module):
    """Keeps a count and a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.facts: dict[str, Any] = {"seen": 0, "names": ("a", None)}
        self.note: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def get_extra_state(self) -> Any:
        return {"facts": dict(self.facts), "note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.facts, self.note = dict(state["facts"]), state["note"]


class Buffered(nn.Module):
    """Buffers of every kind, frozen weights, a parametrization, a weight that nobody reads, and code at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.again = self.norm  # a shared module under two names
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 1))
        self.unread = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale * self.mask
        return self.last(self.frozen(self.again(x)))


class Renaming(nn.Module):
    """Its state_dict has other names, and it takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.last = nn.Linear(WIDTH, 1)
        self._register_state_dict_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
            state[f"{prefix}core.{key.removeprefix(f'{prefix}inner.')}"] = state.pop(key)

    @staticmethod
    def _rename_back(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}core.")]:
            state[f"{prefix}inner.{key.removeprefix(f'{prefix}core.')}"] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


def checkpointed() -> nn.Module:
    """Parts in torch's wrapper, which leaves its own name out of what it lists, and out of its state."""
    first = checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))
    last = nn.Sequential(checkpoint_wrapper(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))
    return nn.Sequential(OrderedDict(first=first, last=last))


class Transposing(nn.Module):
    """Its state_dict holds a weight transposed, under another name, and it takes that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["turned"] = state.pop("first.weight").t()
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(state_dict)
        if "turned" in given:
            given["first.weight"] = given.pop("turned").t()
        return super().load_state_dict(given, *args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Growing(nn.Module):
    """Its forward fills a buffer that was None, and assigns another tensor to one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", None)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach().mean(0)
        self.total = self.total + 1
        return torch.tanh(self.linear(x))


def counters() -> nn.Module:
    return nn.Sequential(Counter(), Counter(), nn.Linear(WIDTH, 1))


def growing() -> nn.Module:
    return nn.Sequential(Growing(), nn.Linear(WIDTH, 1))


MODELS: dict[str, tuple[Callable[[], Workload], list[list[str]]]] = {
    "tied": (
        lambda: workload(Language, "tokens", "blocks.*", "head", batch=tokens, loss=next_token),
        [["tokens", "blocks.0"], ["blocks.1", "blocks.2", "head"]],
    ),
    "extra state": (
        lambda: workload(counters, "*"), [["0"], ["1", "2"]],
    ),
    "buffers": (
        lambda: workload(Buffered, "first", "norm", "frozen", "last"), [["first", "norm"], ["frozen", "last"]],
    ),
    "renamed": (lambda: workload(Renaming, "inner", "last"), [["inner"], ["last"]]),
    "transposed": (lambda: workload(Transposing, "first", "last"), [["first"], ["last"]]),
    "checkpointed": (lambda: workload(checkpointed, "first", "last"), [["first"], ["last"]]),
    "growing": (lambda: workload(growing, "*"), [["0"], ["1"]]),
}  # fmt: skip


def capture_all() -> None:
    """The graphs of all models."""
    for build, _ in MODELS.values():
        graph_of(build())


def plain_after(made: Any, steps: int) -> nn.Module:
    """The plain model after some steps of a plain loop."""
    torch.manual_seed(made.seed)
    model = made.model()
    optimizer = made.make_optimizer(model.named_parameters())
    for n in range(steps):
        inputs, targets = made.make_batch(8, n)
        optimizer.zero_grad()
        made.loss(model(inputs), targets).backward()
        optimizer.step()
    return model
