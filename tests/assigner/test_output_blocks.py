"""Outputs with several entries for each row: joined where those lie together, refused where they lie in blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from workloads import WIDTH, make_plan, numbers, pipeline_of, workload

from assigner.errors import UsageError

STEPS = 3


class Several(nn.Module):
    """Two layers, and what makes of a row several."""

    def __init__(self, arrange) -> None:
        super().__init__()
        self.first, self.last, self.arrange = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), [arrange]

    def forward(self, x):
        return self.arrange[0](x, self.first, self.last)


def _steps(x):
    """(rows, steps, WIDTH)."""
    return x[:, None] * torch.arange(1, STEPS + 1, dtype=x.dtype)[:, None]


TOGETHER = {
    "steps of a row": lambda x, first, last: last(first(_steps(x)).flatten(0, 1)),
    "steps viewed": lambda x, first, last: last(first(_steps(x)).view(-1, WIDTH)),
    "interleaved": lambda x, first, last: last(first(x).repeat_interleave(2, 0)),
    "views stacked beside each other": lambda x, first, last: last(first(torch.stack((x, -x), 1)).reshape(-1, WIDTH)),
    "blocks taken apart again": lambda x, first, last: last(first(torch.cat((x, -x)))).chunk(2),
    "blocks as a dimension": lambda x, first, last: last(first(torch.cat((x, -x)))).unflatten(0, (2, -1)).sum(0),
}
IN_BLOCKS = {
    "views": lambda x, first, last: last(first(torch.cat((x, -x)))),
    "views behind a layer": lambda x, first, last: last(torch.cat((first(x), first(-x)))),
    "repeated": lambda x, first, last: last(first(x).repeat(2, 1)),
    "stacked on each other": lambda x, first, last: last(first(torch.stack((x, -x))).flatten(0, 1)),
    "steps first": lambda x, first, last: last(first(_steps(x).transpose(0, 1)).reshape(-1, WIDTH)),
    "expanded": lambda x, first, last: last(first(x.expand(2, *x.shape).reshape(-1, WIDTH))),
}


def outputs(arrange, micro_batches):
    """What a pipeline and the plain model give for one batch."""
    made = workload(
        lambda: Several(arrange), "first", "last", batch=lambda n, g: (numbers(n, g)[0], None), loss=_no_loss
    )
    inputs = made.make_batch(8, 1)[0]
    torch.manual_seed(made.seed)
    with torch.no_grad():
        want = made.model()(inputs)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        return pipeline.forward(inputs, to=0), want


def test_a_loss_over_the_batch_has_no_rows_in_blocks():
    """It would compare rows that are no pairs."""
    made = workload(
        lambda: Several(IN_BLOCKS["views"]), "first", "last", batch=lambda n, g: (numbers(n, g)[0], None),
        loss=lambda made, _: (made[: len(made) // 2] * made[len(made) // 2 :]).mean(),
    )  # fmt: skip
    made = replace(made, loss_over="batch")
    with (
        pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline,
        pytest.raises(UsageError, match="lie there in several blocks"),
    ):
        pipeline.step(made.make_batch(8, 1))


def _no_loss(made, _):
    return sum(each.mean() for each in ([made] if isinstance(made, torch.Tensor) else made))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_of_one_row_lies_together(name):
    """Of several micro-batches the output is the model's, row for row."""
    torch.testing.assert_close(*outputs(TOGETHER[name], 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_rows_in_blocks_are_not_joined(name):
    """They would have another order than the model's; in one micro-batch they are as they are."""
    torch.testing.assert_close(*outputs(IN_BLOCKS[name], 1))
    with pytest.raises(UsageError, match="lie there in several blocks"):
        outputs(IN_BLOCKS[name], 4)
