"""A backward in two parts gives the gradients of a whole one, whatever the graph; what waits, and what stays."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from assigner.runtime.forward.nodes import count_retained, hooks_so_far
from assigner.runtime.forward.splitbackward import input_part

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 6


class Module(nn.Module):
    """A layer, and a function of it and of what is read."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


class Doubling(torch.autograd.Function):
    """Counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Doubling.calls += 1
        x, w = ctx.saved_tensors
        return 2 * gradient @ w.T, 2 * x.T @ gradient


def hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.register_hook(lambda gradient: 3 * gradient)
    return m.second(y)


def hooked_node(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.grad_fn.register_hook(lambda given, _: tuple(None if each is None else 3 * each for each in given))
    return m.second(y.tanh())


def retained(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = m.first(x)
    m.kept.retain_grad()
    return m.second(m.kept.tanh())


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x).mul_(2).tanh_()
    z = y.clone()
    z[:, 1:3] = m.second(y)[:, :2]
    return z.sin_()


def branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return m.second(m.first(x)) + m.first.weight.sum()
    return m.first(x)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a row of layers": (lambda: Module(lambda m, x: m.second(m.first(x).tanh())), 2),
    "with a norm": (lambda: Module(lambda m, x: m.second(m.norm(m.first(x)) * m.scale), norm=nn.LayerNorm(WIDTH)), 2),
    "three dimensions": (lambda: Module(lambda m, x: m.second(m.first(x.view(2, 4, WIDTH))).flatten(0, 1)), 2),
    "convolution": (
        lambda: Module(
            lambda m, x: m.second(m.norm(m.conv(x[:, None]))[:, 0]),
            conv=nn.Conv1d(1, 3, 3, padding=1), norm=nn.BatchNorm1d(3),
        ),
        2,
    ),
    "used twice in a row": (lambda: Module(lambda m, x: m.second(m.second(m.first(x)).relu())), 1),
    "used twice side by side": (lambda: Module(lambda m, x: m.second(m.first(x)) * m.second(x.tanh())), 2),
    "used by a product and by itself": (lambda: Module(lambda m, x: m.second(m.first(x)) + m.second.weight.sum()), 1),
    "a weight of weights": (lambda: Module(lambda m, x: m.first(x) @ (m.second.weight * m.scale)), 2),
    "weight norm": (
        lambda: Module(
            lambda m, x: m.normed(m.first(x)), normed=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        ),
        2,
    ),
    "scaled by what scales a product": (
        lambda: Module(lambda m, x: m.scale * (m.first(x) @ (m.second.weight * m.scale))), 1
    ),
    "a Function": (lambda: Module(lambda m, x: m.first(Doubling.apply(x, m.second.weight))), 1),
    "a frozen layer": (lambda: Module(lambda m, x: m.second(m.first(x).tanh())).requires_grad_(False), 0),
    "attention": (
        lambda: Module(
            lambda m, x: m.first(m.heads(*[x.view(2, 4, WIDTH)] * 3, need_weights=False)[0]).flatten(0, 1),
            heads=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        ),
        3,
    ),
    "recurrent": (
        lambda: Module(lambda m, x: m.first(m.cell(x.view(4, 2, WIDTH))[0].flatten(0, 1)), cell=nn.GRU(WIDTH, WIDTH)), 2
    ),
    "in place": (lambda: Module(in_place), 2),
    "hooked": (lambda: Module(hooked), 0),
    "a hooked node": (lambda: Module(hooked_node), 0),
    "a gradient that is retained": (lambda: Module(retained), 0),
    "a path that data chooses": (lambda: Module(branches), 1),
    "nothing of it is read": (lambda: Module(lambda m, x: m.second(m.first(x.detach()))), -1),
    "read only beside": (lambda: Module(lambda m, x: m.second(m.first(x.detach())) + x), 0),
    "checkpointed": (lambda: Module(lambda m, x: m.second(checkpoint(m.first, x, use_reentrant=False).tanh())), 2),
    "checkpointed as of old": (
        lambda: Module(lambda m, x: m.second(checkpoint(m.first, x, use_reentrant=True).tanh())), 0
    ),
    "full backward hooks": (lambda: _module_hooked(Module(lambda m, x: m.second(m.first(x).tanh()))), 0),
}  # fmt: skip


def _module_hooked(module: Any) -> nn.Module:
    module.first.register_full_backward_hook(lambda _, given, __: tuple(each * 2 for each in given))
    return module


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_those_of_a_whole_backward(name):
    count_retained()
    make, waiting = CASES[name]
    torch.manual_seed(0)
    module = make().double()
    x = torch.rand(8, WIDTH, dtype=torch.float64)
    given = torch.rand(8, WIDTH, dtype=torch.float64)
    found = []
    for split in (False, True):
        module.zero_grad()
        Doubling.calls = 0
        for _ in range(2):  # the second adds to what the first has left
            read, before = x.clone().requires_grad_(), hooks_so_far()
            edge = get_gradient_edge(module(read)) if module(read).requires_grad else None
            assert edge is not None
            if split:
                rest = input_part([edge], [given], is_hooked=hooks_so_far() != before)
                assert (len(rest.waiting) or -len(rest.edges)) == waiting
                early = None if read.grad is None else read.grad.clone()
                rest.run()
                assert early is None or torch.equal(early, read.grad)
            else:
                torch.autograd.backward([edge], [given])
        found.append([read.grad, *(each.grad for each in module.parameters()), torch.tensor(Doubling.calls)])
        found[-1].append(module.kept.grad if name == "a gradient that is retained" else None)
    for whole, parts in zip(*found, strict=True):
        assert (whole is None) == (parts is None)
        assert whole is None or torch.allclose(whole, parts, rtol=1e-13, atol=1e-13)


def test_several_outputs_some_of_them_unused():
    module = nn.Linear(WIDTH, WIDTH).double()
    x = torch.rand(3, WIDTH, dtype=torch.float64)
    found = []
    for split in (False, True):
        module.zero_grad()
        read = x.clone().requires_grad_()
        edges = [get_gradient_edge(each) for each in (module(read), read * module.bias, module.weight * 2)]
        given = [torch.ones(3, WIDTH).double(), torch.ones(3, WIDTH).double(), torch.ones(WIDTH, WIDTH).double()]
        input_part(edges, given).run() if split else torch.autograd.backward(edges, given)
        found.append([read.grad, module.weight.grad, module.bias.grad])
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts, rtol=1e-13)


def test_between_the_parts_only_what_products_need_is_held():
    module = nn.Linear(WIDTH, WIDTH)
    alive = []

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(tensor))
        return tensor

    read = torch.rand(3, WIDTH).requires_grad_()
    arrives = kept(kept(read.exp()).sin())  # sin, the layer and cos keep what they read
    edge = get_gradient_edge(kept(module(arrives)).cos())
    del arrives
    assert [each() is not None for each in alive] == [True, True, True]
    rest = input_part([edge], [torch.ones(3, WIDTH)])
    del edge
    assert [each() is not None for each in alive] == [False, True, False]
    rest.run()
    assert not any(each() is not None for each in alive)
