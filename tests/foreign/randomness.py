"""Randomness that is not a forward's own generator, and questions about how forward is run."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from foreign.python_state import MARKS, STATE, Net, inside
from torch import nn
from workloads import WIDTH, workload


@inside("asks whether gradients are on", refusal="grad")
class AsksGrad(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if torch.is_grad_enabled() else y


@case("asks at the root whether gradients are on", *MARKS, refusal="grad")
class RootAsksGrad(Net):
    def forward(self, x):
        return super().forward(x * 2 if torch.is_grad_enabled() else x)


@inside("asks x.requires_grad", refusal="grad")
class AsksRequires(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.requires_grad else y


@case("asks at the root h.requires_grad", *MARKS, refusal="grad")
class RootAsksRequires(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(h * 2 if h.requires_grad else h)))


@inside("appends to a history", inherent=True, refusal=STATE)
class History(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.history = []

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.history.append(y.detach().mean())
            return y - 0.1 * sum(self.history)
        return y


@case("generator seeded in forward at the root", *MARKS, refusal="generator|random|seed")
class SeededGenerator(Net):
    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        return super().forward(x + 0.1 * torch.randn(WIDTH, generator=generator, dtype=x.dtype))


@inside("generator seeded in forward", refusal="generator|random|seed")
class SeededInside(nn.Linear):
    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        return super().forward(x) + 0.1 * torch.randn(WIDTH, generator=generator, dtype=x.dtype)


@case("torch.manual_seed in forward at the root", *MARKS, refusal="seed|random")
class ManualSeed(Net):
    def forward(self, x):
        torch.manual_seed(1)
        return super().forward(x + 0.1 * torch.randn(WIDTH, dtype=x.dtype))


@inside("torch.manual_seed in forward", refusal="seed|random")
class ManualSeedInside(nn.Linear):
    def forward(self, x):
        torch.manual_seed(1)
        return super().forward(x) + 0.1 * torch.randn(WIDTH, dtype=x.dtype)


@inside("fork_rng around a seeded draw", refusal="seed|random")
class Forked(nn.Linear):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            noise = torch.randn(WIDTH, dtype=x.dtype)
        return super().forward(x) + 0.1 * noise


@inside("a generator that the module keeps", inherent=True, refusal=STATE + "|generator")
class OwnGenerator(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x):
        y = super().forward(x)
        return y + 0.1 * torch.randn(WIDTH, generator=self.generator, dtype=x.dtype) if self.training else y


@case("asks torch.compiler.is_compiling at the root", *MARKS, refusal="compiling")
class IsCompiling(Net):
    def forward(self, x):
        return super().forward(x * 3 if torch.compiler.is_compiling() else x)


@inside("asks torch.compiler.is_compiling", refusal="compiling")
class IsCompilingInside(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 3 if torch.compiler.is_compiling() else y


@case("asks torch.compiler.is_exporting at the root", *MARKS, refusal="export")
class IsExporting(Net):
    def forward(self, x):
        return super().forward(x * 3 if torch.compiler.is_exporting() else x)


@case("a mask kept by functools.cache", *MARKS)
def _():
    @functools.cache
    def mask(size):
        return torch.ones(size, size, dtype=torch.float64).tril()

    class Cached(Net):
        def forward(self, x):
            return super().forward(x @ mask(x.size(1)) / x.size(1))

    return workload(Cached, *MARKS)


@case("rotary tables kept in a dict by length", *MARKS)
class KeptTables(Net):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        if x.size(1) not in self.tables:
            self.tables[x.size(1)] = torch.linspace(0, 1, x.size(1), dtype=x.dtype)
        return super().forward(x + self.tables[x.size(1)])


@case("a loss with a memory of the loss before", inherent=True, refusal=STATE + "|loss")
def _():
    before = [0.0]

    def loss(made, wanted):
        found = F.mse_loss(made, wanted) + 0.5 * before[0]
        if made.requires_grad:
            before[0] = found.item()
        return found

    return workload(Net, *MARKS, loss=loss)


@case("a loss that counts its calls", inherent=True, refusal=STATE + "|loss")
def _():
    calls = itertools.count()
    return workload(Net, *MARKS, loss=lambda made, wanted: F.mse_loss(made, wanted) / (1 + 0.1 * next(calls)))


@case("a loss module with a running scale", inherent=True, refusal=STATE + "|loss")
def _():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, made, wanted):
            error = (made - wanted).square().mean()
            self.scale.mul_(0.9).add_(0.1 * error.detach())
            return error / self.scale.clone()

    return workload(Net, *MARKS, loss=Scaled())
