"""What a forward does to a value that it reads: to a copy, where the capture saw it, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload

from assigner.errors import UsageError


class Late(nn.Linear):
    """Does something to what it reads from some step on."""

    def __init__(self, change: Any, begins: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change, self.begins, self.count = change, begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        if self.count > self.begins:
            self.change(x)
        return super().forward(x)


class ReadsTwice(nn.Module):
    """Reads one value, which others read too (where `twice`), in parts that are marked."""

    def __init__(self, change: Any, begins: int, *, twice: bool) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(WIDTH, WIDTH), Late(change, begins)
        self.beside, self.last, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.late(y)
        return self.last(z + self.beside(y if self.twice else z))


def without_gradient(change: Any) -> Any:
    """As in the block of `no_grad`."""
    return torch.no_grad()(change)


def made_with(change: Any, begins: int = 2, *, twice: bool = True) -> Any:
    return workload(lambda: ReadsTwice(change, begins, twice=twice), "first", "late", "beside", "last")


def losses(trained: Any, made: Any, steps: int = 4) -> list[float]:
    return [float(trained.step(made.make_batch(8, seed))) for seed in range(steps)]


WRITES = {
    "mul_": lambda x: x.mul_(1.5),
    "a slice": without_gradient(lambda x: x[:, 1:].fill_(0.5)),
    "a view of a view": without_gradient(lambda x: x.view(-1).unsqueeze(0).add_(1)),
    "detached": lambda x: x.detach().mul_(1.5),
    "out": without_gradient(lambda x: torch.mul(x, 2, out=x)),
    "data": lambda x: setattr(x, "data", x.data * 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_begins_late_is_refused_where_the_forward_runs_again(write, twice):
    """Its recompute would write once more, whether others read the value or not."""
    made = made_with(WRITES[write], twice=twice)
    plan = make_plan(made, micro_batches=1, remat=["late"])
    with (
        pipeline_of(made, plan) as pipeline,
        pytest.raises(UsageError, match=r"the forward of partition 'late' (writes in place to|changes) a value"),
    ):
        losses(pipeline, made)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [["beside"], ["first", "beside", "last"]])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_begins_late_is_refused_where_others_read_the_value_elsewhere(write, remat):
    """They may have read it before, or read it again."""
    made = made_with(WRITES[write])
    with (
        pipeline_of(made, make_plan(made, micro_batches=1, remat=remat)) as pipeline,
        pytest.raises(UsageError, match=r"the forward of partition 'late' (writes in place to|changes) a value"),
    ):
        losses(pipeline, made)


@pytest.mark.slow
@pytest.mark.parametrize("write", ["detached", "data"])
def test_within_one_graph_a_late_write_is_that_of_the_plain_model(write):
    """Partitions that are joined have one tensor for a value, as the plain model has."""
    made = made_with(WRITES[write])
    wanted = losses(Reference(made), made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        assert losses(pipeline, made) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [[], ["late"], ["first", "late", "beside", "last"]])
def test_a_write_that_the_capture_sees_goes_to_a_copy(remat):
    """And so under every plan it is that of the plain model."""
    made = made_with(WRITES["mul_"], begins=0)
    wanted = losses(Reference(made), made)
    with pipeline_of(made, make_plan(made, micro_batches=1, remat=remat)) as pipeline:
        assert losses(pipeline, made) == pytest.approx(wanted, rel=1e-12)


def test_a_late_write_in_eval_mode_is_refused_too():
    """Forwards without a backward read values of their own as well."""

    def change(x: torch.Tensor) -> None:
        if not torch.is_grad_enabled() and change.begun:  # type: ignore[attr-defined]
            x.mul_(2)

    change.begun = False  # type: ignore[attr-defined]
    made = made_with(change, begins=-1)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.evaluate(made.make_batch(8, 0))
        change.begun = True  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=r"'late' writes in place to a value"):
            pipeline.evaluate(made.make_batch(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [[], ["first"]])
def test_an_input_that_is_made_to_require_a_gradient_is_let_through(remat):
    """As for forces: no value of it changes, and a recompute finds it so."""
    made = workload(Forces, "first", "last")
    wanted = losses(Reference(made), made)
    with pipeline_of(made, make_plan(made, micro_batches=1, remat=remat)) as pipeline:
        assert losses(pipeline, made) == pytest.approx(wanted, rel=1e-12)


class Wanting(nn.Linear):
    """Has its input require a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        y = super().forward(x).tanh()
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Forces(nn.Module):
    """A first part that asks for a gradient, and a second that reads the input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Wanting(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + x)
