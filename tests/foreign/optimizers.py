# ruff: noqa: ARG002, E501, PLC3002 - a table of short functions
"""Optimizers that look at all parameters, at their attributes, or do more than an update."""

from __future__ import annotations

import numpy as np
import torch
from foreign.case import case
from foreign.hooks import Net
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from workloads import WIDTH, workload

MARKS = ("first", "second", "last")
ALL = "optimizer|all parameters|workers|step|closure"


def with_optimizer(name, optimizer, model=Net, **words):
    def make():
        return workload(model, *MARKS, optimizer=optimizer)

    make.__module__ = __name__
    case(f"optimizer: {name}", **words)(make)


class Clipping(SGD):
    """Clips by the norm over everything before each update."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.5)
        return super().step(closure)


with_optimizer("clipping by the global norm in step", lambda parameters: Clipping(parameters, lr=0.05), refusal=ALL)


class Adapting(Optimizer):
    """A learning rate from sums over all parameters, as in D-Adaptation and Prodigy."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "d": 1e-2, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        first = self.param_groups[0]
        first["numerator"] += sum(float(each.grad.square().sum()) for each in every)
        size = sum(float(each.grad.abs().sum()) for each in every)
        first["d"] = max(first["d"], first["numerator"] / (size + 1e-8) * 1e-2)
        for each in every:
            each.sub_(each.grad, alpha=first["d"] * first["lr"])


with_optimizer("a step size from sums over all parameters (D-Adaptation)", Adapting, refusal=ALL)


def hooked(kind):
    def build(parameters):
        made = SGD(parameters, lr=0.05)

        def clip(optimizer, _args, _kwargs):
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)

        def decay(optimizer, _args, _kwargs):
            with torch.no_grad():
                total = sum(each.square().sum() for each in optimizer.param_groups[0]["params"])
                for each in optimizer.param_groups[0]["params"]:
                    each.div_(1 + 1e-3 * total)

        if kind == "pre":
            made.register_step_pre_hook(clip)
        else:
            made.register_step_post_hook(decay)
        return made

    return build


with_optimizer("a step pre-hook that clips by the global norm", hooked("pre"), refusal=ALL)
with_optimizer("a step post-hook over all weights", hooked("post"), refusal=ALL)


class Flagged(Net):
    """Attributes on parameters say which group they are in."""

    def __init__(self):
        super().__init__()
        for layer in (self.first, self.second, self.last):
            layer.bias.no_decay = True
        self.first.weight.lr_scale = 0.1


def by_attributes(parameters):
    parameters = list(parameters)
    plain = [each for each in parameters if not getattr(each, "no_decay", False)]
    others = [each for each in parameters if getattr(each, "no_decay", False)]
    return AdamW([{"params": plain, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=0.02)


def by_scale(parameters):
    return SGD([{"params": [each], "lr": 0.1 * getattr(each, "lr_scale", 1.0)} for each in parameters])


with_optimizer("groups by attributes hung on parameters", by_attributes, Flagged, refusal="attribute")
with_optimizer("learning rates by attributes hung on parameters", by_scale, Flagged, refusal="attribute")


def by_names(named_parameters):
    named = list(named_parameters)
    return AdamW([
        {"params": [each for name, each in named if "bias" in name], "weight_decay": 0.0},
        {"params": [each for name, each in named if "bias" not in name], "weight_decay": 0.3},
    ], lr=0.02)  # fmt: skip


with_optimizer("groups by names", by_names)
with_optimizer("groups by dimensions", lambda parameters: (lambda every: AdamW([
    {"params": [each for each in every if each.dim() < 2], "weight_decay": 0.0},
    {"params": [each for each in every if each.dim() > 1], "weight_decay": 0.3}], lr=0.02))(list(parameters)))  # fmt: skip
with_optimizer(
    "layer-wise learning rates by position",
    lambda parameters: SGD([{"params": [each], "lr": 0.1 * 0.8**n} for n, each in enumerate(parameters)]),
)
with_optimizer(
    "a group for trainable parameters alone",
    lambda parameters: AdamW([each for each in parameters if each.requires_grad], lr=0.02),
)
with_optimizer("a list that leaves some out", lambda parameters: SGD(list(parameters)[2:], lr=0.05))
with_optimizer("amsgrad, foreach", lambda parameters: AdamW(parameters, lr=0.02, amsgrad=True, foreach=True))
with_optimizer("fused Adam", lambda parameters: torch.optim.Adam(parameters, lr=0.02, fused=True))
with_optimizer("Adafactor", lambda parameters: torch.optim.Adafactor(parameters, lr=0.02))
with_optimizer("Rprop", lambda parameters: torch.optim.Rprop(parameters, lr=0.02))


class Lars(SGD):
    """A trust ratio for each tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(each.norm() / (each.grad.norm() + 1e-6)).clamp_(-1, 1)
        return super().step(closure)


with_optimizer("LARS: a ratio for each tensor", lambda parameters: Lars(parameters, lr=0.02))


class Lookahead(SGD):
    """Slow weights, kept in the optimizer's state."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                slow = state.setdefault("slow", each.clone())
                slow.lerp_(each, 0.5)
                each.copy_(slow)


with_optimizer("Lookahead: slow weights in its state", lambda parameters: Lookahead(parameters, lr=0.05))


class Muon(SGD):
    """Orthogonalises the update of each matrix; others take a plain step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.dim() == 2 and min(each.shape) > 1:
                    x = each.grad / (each.grad.norm() + 1e-7)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.t() @ x
                    each.grad.copy_(x)
        return super().step(closure)


with_optimizer("Muon: orthogonalised matrices", lambda parameters: Muon(parameters, lr=0.02))


class Centred(SGD):
    """Takes the mean gradient over all parameters off each."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        mean = sum(each.grad.sum() for each in every) / sum(each.numel() for each in every)
        for each in every:
            each.grad.sub_(mean)
        return super().step(closure)


with_optimizer(
    "the mean gradient over all parameters taken off", lambda parameters: Centred(parameters, lr=0.05), refusal=ALL
)


class Decaying(SGD):
    """A learning rate from the number of its own steps and of its parameters."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.5 / self.steps / len(group["params"])
        return super().step(closure)


with_optimizer(
    "a learning rate from the number of parameters in step",
    lambda parameters: Decaying(parameters, lr=0.05),
    refusal=ALL,
)


class Noisy(SGD):
    """Adds noise to the gradients, from a generator of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(torch.randn(each.shape, generator=self.generator, dtype=each.dtype), alpha=0.01)
        return super().step(closure)


with_optimizer(
    "gradient noise from a generator of its own",
    lambda parameters: Noisy(parameters, lr=0.05),
    refusal=ALL + "|generator",
)


def averaging(parameters):
    made = SGD(parameters, lr=0.05)
    made.register_step_post_hook(lambda optimizer, _args, _kwargs: [
        optimizer.state[each].setdefault("average", each.detach().clone()).lerp_(each.detach(), 0.1)
        for each in optimizer.param_groups[0]["params"]
    ] and None)  # fmt: skip
    return made


with_optimizer("a post-hook that averages weights in its state", averaging, refusal=ALL)


@case("optimizer in backward: hooks that step each parameter as its gradient is there", refusal="hook", inherent=True)
def _():
    class Stepping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            for each in self.first.parameters():
                each.register_post_accumulate_grad_hook(self.update)

        @staticmethod
        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None

        def forward(self, x):
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)) * self.scale)))

    return workload(Stepping, *MARKS)


class Projecting(SGD):
    """Takes the gradients of long matrices through a random direction, as GaLore-like ones do; of others it draws nothing."""

    def step(self, closure=None):
        for each in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            if each.shape == (1, WIDTH):
                along = torch.randn_like(each)
                each.grad = along * (along * each.grad).sum() / WIDTH
        return super().step(closure)


with_optimizer(
    "random projections of gradients beyond a size",
    lambda parameters: Projecting(parameters, lr=0.05),
    refusal=ALL,
    random=True,
)


class Whimsical(SGD):
    """Takes a step as long as NumPy and torch say, one number of each for all parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.05 * float(np.random.rand() + torch.rand(()))
        return super().step(closure)


with_optimizer(
    "a rate that is drawn anew for each step, from NumPy and torch",
    lambda parameters: Whimsical(parameters, lr=0.05),
    random=True,
)


class Switched(SGD):
    """Has modes, as schedule-free ones: a step in the other one is an error."""

    trains = False

    def train(self):
        self.trains = True

    def eval(self):
        self.trains = False

    def step(self, closure=None):
        assert self.trains, "optimizer.train() comes before step()"
        return super().step(closure)


def train(step, parameters, optimizer):
    optimizer.train()


with_optimizer(
    "modes: train() before each step (schedule-free)", lambda parameters: Switched(parameters, lr=0.05), loop=train
)
