"""Backwards with code of the user's find the Python values that forwards change as their own forward left them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from changing_models import micro_batched
from drawn_combinations import in_parts
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload


class Scaling(nn.Linear):
    """A gradient reversal whose strength grows with the calls, in one of the ways that code has."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.strength, self.calls = 0.1, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        if self.training:
            self.strength += 0.1
            self.calls.append(len(self.calls))
        return self.reversed(made)

    def reversed(self, made: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByHook(Scaling):
    def reversed(self, made: torch.Tensor) -> torch.Tensor:
        if made.requires_grad:
            made.register_hook(lambda gradient: -self.strength * gradient)
        return made


class ByLength(Scaling):
    def reversed(self, made: torch.Tensor) -> torch.Tensor:
        if made.requires_grad:
            made.register_hook(lambda gradient: -0.1 * len(self.calls) * gradient)
        return made


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Scaling) -> torch.Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return -ctx.module.strength * gradients[0], None


class ByFunction(Scaling):
    def reversed(self, made: torch.Tensor) -> torch.Tensor:
        return _Reverse.apply(made, self)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "except_last", "always"])
@pytest.mark.parametrize("order", ["gpipe", "1f1b", "in parts"])
@pytest.mark.parametrize("kind", [ByHook, ByLength, ByFunction])
def test_a_backward_that_reads_what_forwards_change(kind, order, remat):
    """Whatever the order of forwards and backwards: as in training one micro-batch after the other."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind(), nn.Linear(WIDTH, 1)), "*")
    plan = make_plan(made, micro_batches=4, schedule="1f1b" if order == "1f1b" else "gpipe")
    if order == "in parts":
        plan = in_parts(plan, random.Random(4))
    reference = Reference(made)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 4), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-10
