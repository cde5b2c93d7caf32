"""Decisions on values inside of partitions: what a module gives back on ways that rows seldom go counts, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from cutting import of
from torch import nn
from workloads import WIDTH

from assigner.errors import MarkingError
from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable


class Repaired(nn.Linear):
    """Gives back what it is given where nothing is wrong with it."""

    def __init__(self, wrong: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.wrong(x.abs() > 99) else x


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        lambda bad: bad.any(),
        lambda bad: bad.sum(),
        lambda bad: bad.float().sum(),
        lambda bad: torch.is_nonzero(bad.sum()),
        lambda bad: any(bad.sum(0)),
    ],
    ids=["any", "sum", "floats", "is_nonzero", "any of numbers"],
)
def test_the_truth_of_a_number_may_be_false(wrong):
    """A result that is the input itself where a sum is 0 is seen, as one where nothing is true."""

    def forward(self, x):
        given = self.a(x)
        made = self.d(given)
        made.add_(1)
        return self.c(self.b(given) + made)

    with pytest.raises(MarkingError, match="shares memory with a value that is changed in place"):
        partition_graph(of(forward, "a", "b", "c", "d", d=lambda: Repaired(wrong)))
