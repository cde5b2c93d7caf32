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

from assigner.errors import UsageError


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


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.module.calls += 1
        return gradients[0] / ctx.module.calls, None


class Counting(nn.Linear):
    """Its backward counts."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Counted.apply(super().forward(x), self)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_backward_of_nothing_is_not_the_one_that_is_looked_at(schedule, remat):
    """A micro-batch whose loss is a constant comes before the first one that shows what backwards do."""

    def loss(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (made - wanted).square().mean() if wanted.max() > 0 else made.new_zeros(())

    made = workload(
        lambda: nn.Sequential(Counting(WIDTH, WIDTH), Counting(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*", loss=loss
    )
    x, _ = made.make_batch(8, 0)
    unlabelled, labelled = torch.full((4, 1), -1.0).double(), torch.ones(4, 1).double()
    parts = [labelled, unlabelled] if schedule == "gpipe" else [unlabelled, labelled]  # in the order of backwards
    plan = make_plan(made, micro_batches=2, schedule=schedule)
    with (
        pipeline_of(made, plan, remat=remat) as pipeline,
        pytest.raises(UsageError, match=r"the backward of partition '[01]' changes what its modules keep"),
    ):
        pipeline.step((x, torch.cat(parts)))
