"""Losses that take gradients by themselves, of one output by another: whole ones, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload

from assigner.errors import UsageError


class Skip(nn.Module):
    """Coordinates that the last layer reads, and what other layers have made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().detach().requires_grad_(True)
        return self.c(torch.cat([torch.sin(self.b(torch.sin(self.a(x)))), x.square()], 1)), x


class Through(Skip):
    """The last layer reads them through others alone."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().detach().requires_grad_(True)
        h = torch.sin(self.b(torch.sin(self.a(x))))
        return self.c(torch.cat([h, h], 1)), x


class Tail(nn.Module):
    """A last partition that makes both outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = self.inner(h)
        return self.outer(u.sin()), u


class Tailed(nn.Module):
    """One of the outputs is made of the other in the last partition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Tail()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.c(torch.sin(self.b(torch.sin(self.a(x)))))


def slope(outputs, targets, **more):
    y, x = outputs
    (g,) = torch.autograd.grad(y, [x], torch.ones_like(y), create_graph=True, **more)
    return (y - targets[:, :1]).square().mean() + (0 if g is None else (g.norm(dim=1) - 1).square().mean())


def unused(outputs, targets):
    return slope(outputs, targets, allow_unused=True)


@pytest.mark.parametrize("remat", [(), ("a", "b", "c")], ids=["kept", "again"])
@pytest.mark.parametrize("loss", [slope, unused])
@pytest.mark.parametrize("model", [Skip, Through])
def test_a_part_of_a_gradient_is_refused(model, loss, remat):
    """What other partitions have made of the one output is not in the graph of the last."""
    made = workload(model, "a", "b", "c", loss=loss)
    with (
        pipeline_of(made, make_plan(made, micro_batches=2, remat=remat)) as pipeline,
        pytest.raises(UsageError, match="that part of the gradient would be missing"),
    ):
        pipeline.step(made.make_batch(8, seed=1))


def test_a_whole_gradient_is_taken():
    """Where the last partition makes both outputs."""
    made = workload(Tailed, "a", "b", "c", loss=slope)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for seed in (1, 2):
            batch = made.make_batch(8, seed=seed)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)
            assert reference.gradient_distance(pipeline.gradients()) < 1e-12
