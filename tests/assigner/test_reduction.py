"""When the sums of a stage's gradients begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import nn

from assigner.errors import UsageError
from assigner.runtime.recording.memory import MemoryGauge
from assigner.runtime.recording.recorder import Recorder
from assigner.runtime.stages import reduction as runtime
from assigner.runtime.stages.reduction import Reduction
from assigner.schedule.orders import ActionKind, reduced_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.runtime.ranks.workergroups import WorkerGroup


@dataclass
class SumAtOnce:
    """Of one worker: it is there before anybody can ask when it began."""

    tensor: torch.Tensor

    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def wait(self) -> torch.Tensor:
        return self.tensor


@dataclass
class GroupOfOne:
    """Stands for the workers of a stage; notes how many numbers each sum has."""

    direct: bool = False
    sizes: list[int] = field(default_factory=list)

    def add_up(self, tensor: torch.Tensor) -> SumAtOnce:
        self.sizes.append(tensor.numel())
        return SumAtOnce(tensor)


def parameter(count: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(count, dtype=dtype))
    made.grad = torch.ones(count, dtype=dtype)
    return made


def reduction(group: GroupOfOne, **partitions: dict[str, nn.Parameter]) -> Reduction:
    return Reduction({0: (cast("WorkerGroup", group), partitions)})


def test_a_sum_that_is_there_at_once_does_not_end_before_it_began() -> None:
    """Its begin lies behind the copies and before the sum, however little that takes."""
    weight, recorder = parameter(3), Recorder(MemoryGauge(torch.device("cpu")), last=1)
    recorder.begin_step()
    made = reduction(GroupOfOne(), p0={"weight": weight})
    made.begin(0, recorder)
    made.end()
    recorder.end_step(whole=True)
    (_, span) = recorder.steps[0].spans
    assert span.action is not None
    assert (span.action.kind, span.action.stage, span.action.micro_batch) == (ActionKind.REDUCE, 0, -1)
    assert span.start_s <= span.end_s
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_sums_begin_partition_by_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket begins when the first partition that adds to it is done, whatever types lie between; the rest last."""
    monkeypatch.setattr(runtime, "BUCKET_BYTES", 40)
    group, double = GroupOfOne(), torch.float64
    made = reduction(
        group,
        p0={"a": parameter(1), "b": parameter(2, double)},
        p1={"c": parameter(10)},
        p2={"d": parameter(3), "e": parameter(4, double)},
        p3={"f": parameter(5, double)},
    )
    seen = []
    for name in ("p3", "p2", "p1", "p0"):
        made.begin(0, behind=name)
        seen.append(list(group.sizes))
    assert seen == [[6], [6, 5, 4], [6, 5, 4, 11], [6, 5, 4, 11, 3, 2]]
    made.begin(0)
    made.begin_rest()
    made.end()
    assert len(group.sizes) == 6


def test_the_order_is_the_same_where_nothing_begins_early() -> None:
    """A member that begins all at once, a worker without a micro-batch, begins the same sums in the same order."""
    held = {f"p{n}": {f"w{n}": parameter(n + 1)} for n in range(3)}
    early, late = GroupOfOne(), GroupOfOne()
    one, other = reduction(early, **held), reduction(late, **held)
    one.begin(0, behind="p1")
    one.begin(0)
    other.begin_rest()
    assert early.sizes == late.sizes


def test_a_bucket_keeps_its_memory_unless_somebody_holds_a_gradient() -> None:
    """What a script keeps of a gradient stays as it was, also a part of it."""
    weight, kept, places = parameter(3), None, []
    made = reduction(GroupOfOne(), p0={"weight": weight})
    for step in range(5):
        weight.grad = torch.full((3,), float(step))
        made.begin(0)
        made.end()
        assert weight.grad.tolist() == [step] * 3
        places.append(weight.grad.data_ptr())
        kept = weight.grad[1:] if step == 2 else kept
        weight.grad = None
    assert places[0] == places[1] == places[2] != places[3] == places[4]
    assert kept is not None
    assert kept.tolist() == [2.0, 2.0]


def test_nothing_begins_early_through_nccl() -> None:
    """The members of its groups meet before each sum."""
    group = GroupOfOne(direct=True)
    made = reduction(group, p0={"weight": parameter(3)})
    made.begin(0)
    assert not group.sizes
    made.begin_rest()
    assert group.sizes == [4]


def test_what_comes_behind_its_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook in one partition that adds to another one's gradient would be lost."""
    monkeypatch.setattr(runtime, "BUCKET_BYTES", 1)
    first, second = parameter(2), parameter(3)
    made = reduction(GroupOfOne(), p0={"first": first}, p1={"second": second})
    made.begin(0, behind="p1")
    second.grad = torch.ones(3)
    made.begin(0)
    with pytest.raises(UsageError, match="adds to the gradient of second"):
        made.end()
    made.forget()


def test_only_a_backward_right_before_its_reduction_begins_it() -> None:
    """Another stage's reduction in front of it comes first, on all workers."""
    backward, weights, reduce = ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT, ActionKind.REDUCE
    steps = [(backward, 1, 0), (backward, 0, 0), (weights, 2, 1), (reduce, 2, -1), (reduce, 1, -1)]
    assert reduced_within([*steps, (backward, 0, 1), (reduce, 0, -1)]) == {(weights, 2, 1), (backward, 0, 1)}
