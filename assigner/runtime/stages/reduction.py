"""Gradients of stages that several workers share: added up while the step goes on, in flat buckets.

Each worker has what its own micro-batches have made. While its last backward of a stage goes through the partitions,
the last one first, it copies what they will not add to any more into buckets, which are added up over the workers
meanwhile; the step's end waits for the sums, and they become the gradients:

    worker 0    B p3 p2 | copy, begin | p1 p0 | copy, begin |  backwards of other stages  | wait
    bucket              a  b  -  1  1  0             no worker has a gradient of the third parameter: it gets none
    worker 1            a' -  -  1  0  0    ->  sum  a + a'  b  -  2  1  0

The marks behind the values count the workers that have a gradient: a zero in the place of one would be another thing.
A parameter that several partitions use waits for the first of them. All members begin their buckets in one order.

Through NCCL nothing begins early: its kernels spin until all members have launched theirs, so the members meet first
(see `handshake`), and would wait there for each other in the middle of the step. There the sums begin at the step's
end, when all that this worker sends has left.

A sparse gradient (`nn.Embedding(sparse=True)`) becomes a dense one: others may have rows that this worker has not.

Source of the buckets, of their size and of their beginning within a backward: Li et al., PyTorch Distributed, VLDB 2020
(arXiv 2006.15704), section 3.2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from assigner.errors import UsageError
from assigner.runtime.ranks.workergroups import PendingTensor, WorkerGroup
from assigner.runtime.recording.recorder import RecordedSpan
from assigner.schedule.orders import ActionKind
from assigner.schedule.program import Action
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.runtime.recording.recorder import Recorder

_OWN = 2  # a flat tensor's own hold on its memory, and that of the object that is asked


SharedStage = tuple[WorkerGroup, "Mapping[str, Mapping[str, nn.Parameter]]"]
"""The workers that share a stage, and what they add up of it: by partition in the stage's order, and each at the first
that uses it; the same on all members, in one order."""


@dataclass
class _Bucket:
    """Parameters of one type, whose gradients lie in one flat tensor, in their order.

    Args:
        after: The position of the first partition that adds to one of them: its backward is the last to do so.
        flat: Its memory on a CPU, which the gradients lie in afterwards; None: none yet.
        parts: Of this, those of the gradients, while it is added up.
        ended_s: When the sum was there, on this process's clock; empty: not yet, or nobody notes it.
    """

    parameters: dict[str, nn.Parameter]
    after: int
    flat: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    pending: PendingTensor | None = None
    span: RecordedSpan | None = None
    ended_s: list[float] = field(default_factory=list)

    def begin(self, group: WorkerGroup, stage: int, recorder: Recorder | None) -> None:
        """Copy the gradients, drop them, and begin to add up; the copy is noted with the sum, as it is measured."""
        self.span = None if recorder is None else recorder.begin(Action(ActionKind.REDUCE, stage, -1))
        held = list(self.parameters.values())
        flat = self._memory(held)
        self.flat = flat if flat.device.type == "cpu" else None
        self.parts = copy_gradients(self.parameters, flat)
        for parameter in held:
            parameter.grad = None
        self.pending, self.ended_s = group.add_up(flat), []  # a small sum is there before this returns
        if self.span is not None:
            ended_s = self.ended_s
            self.pending.when_done(lambda: ended_s.append(time.perf_counter()))

    def _memory(self, held: Sequence[nn.Parameter]) -> torch.Tensor:
        """The last step's, unless somebody has a gradient still that lies in it.

        Memory that is given back to the system and taken anew is filled with zeros, page by page: 8 % of a step. A
        GPU's allocator keeps it by itself, and knows which streams still read it.
        """
        if self.flat is not None and torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata) <= _OWN:
            return self.flat
        size = sum(each.numel() for each in held) + len(held)
        return torch.empty(size, dtype=held[0].dtype, device=held[0].device)

    def end(self) -> torch.Tensor:
        """Wait for the sum; its values become the gradients, and its marks are given back."""
        assert self.pending is not None
        flat, parts, self.pending, self.parts = self.pending.wait(), self.parts, None, []
        if self.span is not None:
            self.span.done()
            if self.ended_s:  # the thread that notes the end may come to it later than this one
                self.span.end_s = self.ended_s[0]
        for (name, parameter), part in zip(self.parameters.items(), parts, strict=True):
            if parameter.grad is not None:
                raise UsageError(
                    f"a backward adds to the gradient of {name} when its own partition's backwards are done: the"
                    " workers of its stage add it up already",
                    hint="let the partition that uses a parameter add to its gradient; or place it on one worker",
                )
            parameter.grad = part
        return flat[-len(self.parameters) :]


class Reduction:
    """The sums of this rank's gradients over the workers that hold the same stages, by the stages' numbers.

    No exchange of shared parameters adds up any of them already.
    """

    def __init__(self, stages: Mapping[int, SharedStage]) -> None:
        self._groups = {stage: group for stage, (group, _) in stages.items()}
        self._positions = {stage: {name: n for n, name in enumerate(held)} for stage, (_, held) in stages.items()}
        self._buckets = {stage: _buckets([*partitions.values()]) for stage, (_, partitions) in stages.items()}

    @property
    def names(self) -> list[str]:
        """Of all parameters that are added up."""
        return [name for held in self._buckets.values() for each in held for name in each.parameters]

    def begin(self, stage: int, recorder: Recorder | None = None, *, behind: str | None = None) -> None:
        """Begin to add up gradients of a stage: a partition and those behind it, whose backwards are done, or all."""
        if not self._groups[stage].direct:
            self._begin(stage, recorder, 0 if behind is None else self._positions[stage][behind])

    def begin_rest(self, recorder: Recorder | None = None) -> None:
        """All backwards of the step are done, and what they send has left: begin with what waits for that."""
        for stage in sorted(self._buckets, reverse=True):
            self._begin(stage, recorder, 0)

    def _begin(self, stage: int, recorder: Recorder | None, position: int) -> None:
        for each in self._buckets[stage]:
            if each.pending is None and each.after >= position:
                each.begin(self._groups[stage], stage, recorder)

    def end(self) -> None:
        """Wait for all sums: parameters of the stages have the gradients of all workers.

        Raises:
            LostConnectionError: a worker is gone.
            UsageError: a gradient has been added to since its sum began.
        """
        buckets = [each for stage in sorted(self._buckets, reverse=True) for each in self._buckets[stage]]
        marks = [each.end() for each in buckets]
        for each, mark in zip(buckets, marks, strict=True):
            for parameter, workers in zip(each.parameters.values(), mark.real.tolist(), strict=True):
                if not workers:
                    parameter.grad = None

    def forget(self) -> None:
        """Drop what an unfinished step has begun."""
        for held in self._buckets.values():
            for each in held:
                each.pending = each.span = each.flat = None
                each.parts = []


def _buckets(partitions: Sequence[Mapping[str, nn.Parameter]]) -> list[_Bucket]:
    """The buckets of a stage, in the order in which its last backward completes them."""
    position = {name: n for n, held in enumerate(partitions) for name in held}
    cut = in_buckets([each for held in partitions for each in held.items()], BUCKET_BYTES)
    return sorted((_Bucket(each, min(position[name] for name in each)) for each in cut), key=lambda each: -each.after)


def in_buckets(parameters: Iterable[tuple[str, nn.Parameter]], most_bytes: int) -> list[dict[str, nn.Parameter]]:
    """Parameters in buckets of one type each, of so many bytes or one parameter; the last come first.

    So backwards make their gradients.
    """
    open_: dict[torch.dtype, tuple[dict[str, nn.Parameter], int]] = {}
    found: list[dict[str, nn.Parameter]] = []
    for name, parameter in reversed(list(parameters)):
        bucket, size = open_.get(parameter.dtype, (None, 0))
        if bucket is None or size + parameter.nbytes > most_bytes:
            bucket, size = {}, 0
            found.append(bucket)
        bucket[name] = parameter
        open_[parameter.dtype] = bucket, size + parameter.nbytes
    return found


@torch.no_grad()
def copy_gradients(parameters: Mapping[str, nn.Parameter], flat: torch.Tensor) -> list[torch.Tensor]:
    """Copy gradients into a flat tensor, zeros where there is none, and behind them a mark for each that there is.

    Returns:
        The parts of it that they are in.
    """
    held, parts = list(parameters.values()), parts_of(flat, parameters)
    flat[-len(held) :] = torch.tensor([float(each.grad is not None) for each in held], device="cpu")
    pairs = [(part, each.grad) for part, each in zip(parts, held, strict=True) if each.grad is not None]
    given = [gradient.to_dense() if gradient.is_sparse else gradient for _, gradient in pairs]
    if pairs:
        torch._foreach_copy_([part for part, _ in pairs], given)
    for part, each in zip(parts, held, strict=True):
        if each.grad is None:
            part.zero_()
    return parts


def parts_of(flat: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    """The parts of a flat tensor that parameters take, in their order and shapes; more may follow in it."""
    sizes = [each.numel() for each in parameters.values()]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(each.shape) for part, each in zip(parts, parameters.values(), strict=True)]
