"""Models whose partitions do not compute what the whole does, each in a way of its own; and some that look so."""

from __future__ import annotations

import random

import torch
from torch import nn
from workloads import WIDTH, workload


class SharedList(nn.Module):
    """Each block adds to one list, and the last one reads how much all have added."""

    class Block(nn.Module):
        def __init__(self, seen: list[float], *, reads: bool) -> None:
            super().__init__()
            self.inner, self.seen, self.reads = nn.Linear(WIDTH, WIDTH), seen, reads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            self.seen.append(0.5)
            return x + sum(self.seen) if self.reads else x

    def __init__(self) -> None:
        super().__init__()
        seen: list[float] = []
        self.blocks = nn.ModuleList(self.Block(seen, reads=n == 1) for n in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counting(nn.Module):
    """The root counts its calls, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last, self.calls = nn.Linear(WIDTH, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.parts[0](x)
        x = self.parts[1](x * self.calls)
        return self.last(x)


class Skipping(nn.Module):
    """The root skips a block by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            made = part(x)
            x = made if random.random() < 0.5 else x
        return self.last(x)


class Noisy(nn.Module):
    """A marked module draws from Python's generator."""

    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + random.random())

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Part(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class History(nn.Module):
    """A marked module that scales by how often it was called: a recompute is another call."""

    class Part(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), self.Part(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Spectral(nn.Module):
    """Spectral normalisation, which moves a buffer in each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class ClippingSGD(torch.optim.SGD):
    """Clips by the norm over all its parameters, inside of step."""

    def step(self) -> None:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1e-3)
        super().step()


def simple() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def clipping():
    """Partitions 0 to 3, with an optimizer that looks at all of them."""
    return workload(simple, "*", optimizer=lambda p: ClippingSGD(p, lr=0.1))


WRONG = {
    "shared list": lambda: workload(SharedList, "blocks.*", "last"),
    "counting root": lambda: workload(Counting, "parts.*", "last"),
    "skipping root": lambda: workload(Skipping, "parts.*", "last"),
    "clipping optimizer": clipping,
}
