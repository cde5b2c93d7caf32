# ruff: noqa: ARG004, ARG005 - the signatures are torch's
"""Backward code of the user's own: autograd Functions and autograd.grad, between marked layers and inside of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from foreign.inplace import Between
from torch import nn
from torch.autograd import Function, Variable
from workloads import WIDTH, workload


class RoundSTE(Function):
    """Rounds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reverse(Function):
    """Gradient reversal (DANN)."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.alpha * gradient, None


class Sine(Function):
    """Keeps its input for the backward, which is not quite the derivative."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.sin(x) * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * torch.cos(x) * scale * 0.9, (gradient * torch.sin(x)).sum().reshape(scale.shape)


class SetupSine(Function):
    """The newer form, with setup_context."""

    @staticmethod
    def forward(x):
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x) * 0.8


class Halves(Function):
    """Two outputs, of which the second gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        largest, where = x.max(dim=1, keepdim=True)
        ctx.save_for_backward(where)
        ctx.width = x.size(1)
        ctx.mark_non_differentiable(where)
        return largest, where

    @staticmethod
    def backward(ctx, gradient, _):
        (where,) = ctx.saved_tensors
        return torch.zeros(gradient.size(0), ctx.width, dtype=gradient.dtype).scatter_(1, where, gradient * 2)


class Twice(Function):
    """Writes into its input and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.5


class Two(Function):
    """Two differentiable outputs, with undefined gradients kept as None."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x + y, x - y

    @staticmethod
    def backward(ctx, up, down):
        up, down = (0.0 if each is None else each for each in (up, down))
        return 0.5 * up + down, up - down


class Clip(Function):
    """Clips the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-ctx.limit, ctx.limit), None


class Once(Function):
    """Once differentiable, needs_input_grad asked."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        first = gradient @ weight if ctx.needs_input_grad[0] else None
        second = 0.5 * gradient.t() @ x if ctx.needs_input_grad[1] else None
        return first, second


GLUE = {
    "straight-through rounding": lambda h, x: RoundSTE.apply(h * 4) / 4,
    "gradient reversal": lambda h, x: Reverse.apply(h, 0.5),
    "sine with saved tensors": lambda h, x: Sine.apply(h, x.new_full((1,), 2.0)),
    "setup_context": lambda h, x: SetupSine.apply(h),
    "a non-differentiable output": lambda h, x: h + Halves.apply(h)[0] * (1 + Halves.apply(h)[1]),
    "mark_dirty": lambda h, x: Twice.apply(h * 1.0),
    "two outputs, one unused": lambda h, x: Two.apply(h, x)[0],
    "two outputs, both used": lambda h, x: torch.tanh(Two.apply(h, x)[0]) * Two.apply(h, x)[1],
    "gradient clipping": lambda h, x: Clip.apply(h, 1e-3),
    "under no_grad: a detached rounding": lambda h, x: h + (RoundSTE.apply(h) - h).detach(),
    "of the input alone": lambda h, x: h + RoundSTE.apply(x),
}


def _add_function(name, glue):
    def make():
        return workload(lambda: Between(glue), "first", "second", "last")

    make.__module__ = __name__
    case(f"Function between marks: {name}")(make)


for _name, _glue in GLUE.items():
    _add_function(_name, _glue)


class Wrapped(nn.Module):
    """A module around a Function, marked by none."""

    def __init__(self, function, *extra):
        super().__init__()
        self.function, self.extra = function, extra

    def forward(self, x):
        return self.function.apply(x, *self.extra)


@case("Function in an unmarked submodule", "first", "last")
class UnmarkedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.round, self.last = nn.Linear(WIDTH, WIDTH), Wrapped(RoundSTE), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.round(self.first(x)))


@case("Function in a marked submodule", "first", "reverse", "last")
class MarkedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.reverse, self.last = nn.Linear(WIDTH, WIDTH), Wrapped(Reverse, 0.3), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.reverse(self.first(x))))


class OnceLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return Once.apply(x, self.weight)


@case("a layer made of a Function over its weight, marked", "layers.*", "last")
class OnceLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(OnceLayer() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@case("a Function over a parameter of the root", "first", "last")
class RootWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return self.last(Once.apply(torch.tanh(self.first(x)), self.weight))


@case("quantisation-aware training: the scale a moving buffer", "layers.*", "last", inherent=True)
class FakeQuantised(nn.Module):
    """Weights and activations rounded to 15 levels, by scales that move in training."""

    class Quantised(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            if self.training:
                self.scale.mul_(0.9).add_(0.1 * x.detach().abs().max())
            step = self.scale / 7
            x = x + (torch.round(x / step).clamp(-7, 7) * step - x).detach()
            weight = self.weight + (torch.round(self.weight * 8) / 8 - self.weight).detach()
            return F.linear(x, weight, self.bias)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Quantised(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


@case("fake_quantize_per_tensor_affine at the root", "first", "second", "last", refusal="cannot be traced")
class TorchFakeQuantise(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.fake_quantize_per_tensor_affine(self.first(x).float(), 0.05, 0, -128, 127).to(x.dtype)
        return self.last(torch.tanh(self.second(h)))


class Energy(nn.Module):
    """A potential and its force, by autograd.grad with create_graph."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force


@case("autograd.grad inside a marked module", "energy", "last")
class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy, self.last = Energy(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.energy(x))


class AsksForGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.lin(x)
        return y if self.lin.weight.grad is None else y / (1 + self.lin.weight.grad.norm())


class DropsGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.lin.weight.grad = None
        return self.lin(x)


@case("a partition's forward drops the gradient of its weight", "dropping", "last", refusal="sets the gradient of")
class GradientDropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropping, self.last = DropsGradient(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.dropping(x)))


@case(
    "a partition's forward reads the gradient of its weight", "scaled", "last", refusal="reads or sets the gradient of"
)
class GradientScaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled, self.last = AsksForGradient(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.scaled(x)))


class AsksInVain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.mean.grad is not None:
            self.mean.grad = None
        self.lin.to(x.device)
        return self.lin(x) + self.mean


@case("a partition's forward asks for the gradient of a buffer, and has a module where its input is", "asking", "last")
class GradientOfBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.asking, self.last = AsksInVain(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.asking(x)))


class KeepsInGradient(AsksInVain):
    def forward(self, x):
        y = self.lin(x) if self.mean.grad is None else self.lin(x) + self.mean.grad
        self.mean.grad = y.detach().mean(0)
        return y


@case("a partition's forward keeps a value as the gradient of a buffer", "keeping", "last", refusal="sets the gradient")
class GradientAsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.keeping, self.last = KeepsInGradient(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.keeping(x)))


class ComesAsFloat(AsksInVain):
    def forward(self, x):
        return self.lin.float()(x.float()).to(x.dtype)


@case("a partition's forward gives its weights another type", "twice", "last", refusal="sets the gradient")
class WeightsAsFloat(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.last = ComesAsFloat(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.twice(x)))


@case("autograd.grad at the root, of a marked module's output", "net", "last", refusal="grad|traced")
class RootForces(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return self.last(force)


def penalty(made, wanted):
    """The loss, weighted by its own gradient with respect to the output."""
    loss = F.mse_loss(made, wanted)
    if not made.requires_grad:
        return loss
    (slope,) = torch.autograd.grad(F.l1_loss(made, wanted, reduction="sum"), made, create_graph=True)
    return loss + 0.1 * slope.square().mean()


@case(
    "autograd.grad in the loss (gradient penalty on outputs)",
    "first",
    "last",
    loss=penalty,
)
class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@case("detach and a stopped branch", "first", "second", "last")
class Stopped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last(self.second(h.detach()) + 0.1 * h)


@case("a no_grad region around a marked module", "teacher", "student", "last")
class NoGradRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        with torch.no_grad():
            wanted = torch.tanh(self.teacher(x))
        return self.last(self.student(x) * wanted)


@case("a straight-through Gumbel-like choice by detach", "first", "experts.*", "last")
class HardChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        soft = torch.softmax(self.first(x), dim=1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0)
        gate = hard - soft.detach() + soft
        return self.last(sum(gate[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts)))


class Descends(nn.Linear):
    """One step along the gradient of an energy, from a leaf that old code makes."""

    def forward(self, x):
        with torch.enable_grad():
            leaf = Variable(x.data, requires_grad=True)
            (torch.tanh(leaf).square().sum() * 0.5).backward()
        return super().forward(x - 0.1 * leaf.grad)


@case("a Variable in a marked module, whose gradient it reads", "first", "last")
class OfVariable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Descends(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@case("a Variable of a hidden value at the root, with a gradient and without", "first", "second", "last")
class VariableBetween(OfVariable):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(Variable(h.data, requires_grad=True)) + h + Variable(h)))
