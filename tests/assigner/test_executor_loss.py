"""The loss of micro-batches that count for nothing, whatever the model's last partition returns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_cases import IGNORED, counted, differences, some_tokens
from workloads import TOKENS, WIDTH, Reference, make_plan, next_token, numbers, pipeline_of, workload

from assigner.errors import UsageError


class Sized(nn.Module):
    """Returns a number, computed from the shape, beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.head(self.tokens(ids)), 2 * ids.shape[0]


@pytest.mark.long
def test_a_number_beside_the_outputs():
    """A micro-batch of weight 0 counts for nothing, and its backward runs through the tensors."""
    made = workload(Sized, "*", batch=some_tokens, loss=lambda output, targets: next_token(output[0], targets))
    made = replace(made, weight=counted)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat="never") as pipeline:
        ids, targets = made.make_batch(8, 0)
        targets = targets.clone()
        targets[:2] = IGNORED
        assert abs(pipeline.step((ids, targets)) - reference.step((ids, targets))) < 1e-10
        assert all(each < 1e-10 for each in differences(pipeline, reference).values())


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("over", ["micro_batch", "batch"])
@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_loss_without_a_gradient(remat: str, over: str):
    """A step that would train nothing is refused, as a plain backward; an evaluation needs no gradient."""
    made = replace(workload(_layers, batch=numbers), loss_over=over)
    batch = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
        pipeline.step(batch)
        parameters = dict(pipeline.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        pipeline.evaluate(batch)
        with pytest.raises(UsageError, match="the loss requires no gradient"):
            pipeline.step(batch)
        parameters["0.weight"].requires_grad_(True)
        pipeline.step(batch)
