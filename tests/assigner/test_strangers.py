"""What a model, its loss or its backward reach outside of their own: as in one process, or refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph


def test_a_loss_that_reads_the_model_of_the_builder():
    """The builder's model has no values: the words say what a loss sees."""
    built: list[nn.Module] = []

    def builder() -> nn.Module:
        built.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
        return built[-1]

    def loss(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (made - wanted).square().mean() + sum(each.square().sum() for each in built[-1].parameters())

    made = workload(builder, loss=loss)
    pipeline = pipeline_of(made, make_plan(made))
    with pytest.raises(UsageError, match=r"the script uses 0\.weight of the model that the builder has made"):
        pipeline.step(made.make_batch(8, 0))
    pipeline.close()


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_a_loss_that_fails_on_a_tensor_without_values(beside):
    """A teacher that the builder makes has none; another error of the loss stays what it is."""
    teachers: list[nn.Module] = []

    def builder() -> nn.Module:
        teachers[:] = [nn.Linear(1, 1)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def loss(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if not beside:
            raise RuntimeError("no metadata")
        return (teachers[0](made) - wanted).square().mean()

    made = workload(builder, loss=loss)
    with pipeline_of(made, make_plan(made)) as pipeline:
        if beside:
            with pytest.raises(UsageError, match=r"that Workload\.model has made, where tensors have no values"):
                pipeline.step(made.make_batch(8, 0))
        else:
            with pytest.raises(RuntimeError, match="no metadata"):
                pipeline.step(made.make_batch(8, 0))


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.add_(gradient.square().sum())
        return gradient, None


class Watching(nn.Linear):
    """Moves a buffer in its backward."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counting.apply(super().forward(x), self.seen)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "remat"), [(2, "never"), (1, "always")])
def test_a_backward_that_moves_a_buffer(micro_batches, remat):
    """Where forwards of other micro-batches, or a recompute, come between, it is refused."""
    made = workload(lambda: nn.Sequential(Watching(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    pipeline = pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat)
    with pytest.raises(UsageError, match="the backward of partition '0' changes a buffer or a weight"):
        pipeline.step(made.make_batch(8, 0))
    pipeline.close()


def test_a_partition_that_reads_a_tensor_of_the_model():
    """By a list, past the module tree: the worker that runs it may lack it."""

    class Peeking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.others[0].weight.sum()

    def builder() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Peeking(WIDTH, 1))
        model[1].others = [model[0]]
        return model

    with pytest.raises(MarkingError, match=r"'1' reads '0\.weight', which is not its own"):
        partition_graph(workload(builder))
