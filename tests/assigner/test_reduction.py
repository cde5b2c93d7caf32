"""When the sum of a stage's gradients begins and ends, as a trace has it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from assigner.runtime.recorder import RecordedSpan
from assigner.runtime.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.runtime.workergroups import WorkerGroup


@dataclass
class SumAtOnce:
    """Of one worker: it is there before anybody can ask when it began."""

    tensor: torch.Tensor

    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def wait(self) -> torch.Tensor:
        return self.tensor


class GroupOfOne:
    """Stands for the workers of a stage."""

    direct = False

    def add_up(self, tensor: torch.Tensor) -> SumAtOnce:
        return SumAtOnce(tensor)


def test_a_sum_that_is_there_at_once_does_not_end_before_it_began() -> None:
    """Its begin lies behind the copies and before the sum, however little that takes."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    reduction = Reduction({0: (cast("WorkerGroup", GroupOfOne()), {"weight": parameter})})
    span = RecordedSpan(None, time.perf_counter())
    reduction.begin(0, span)
    begun = span.start_s
    reduction.end()
    assert begun <= span.start_s <= span.end_s
    assert parameter.grad.tolist() == [1.0, 1.0, 1.0]
