"""The loss of micro-batches that count for nothing, whatever the model's last partition returns."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from training_cases import IGNORED, counted, differences, some_tokens
from workloads import TOKENS, WIDTH, Reference, make_plan, next_token, workload

from assigner import Pipeline


class Sized(nn.Module):
    """Returns a number, computed from the shape, beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.head(self.tokens(ids)), 2 * ids.shape[0]


def test_a_number_beside_the_outputs():
    """A micro-batch of weight 0 counts for nothing, and its backward runs through the tensors."""
    made = workload(Sized, "*", batch=some_tokens, loss=lambda output, targets: next_token(output[0], targets))
    made = replace(made, weight=counted)
    reference = Reference(made)
    with Pipeline(made, make_plan(made), remat="never") as pipeline:
        ids, targets = made.make_batch(8, 0)
        targets = targets.clone()
        targets[:2] = IGNORED
        assert abs(pipeline.step((ids, targets)) - reference.step((ids, targets))) < 1e-10
        assert all(each < 1e-10 for each in differences(pipeline, reference).values())
