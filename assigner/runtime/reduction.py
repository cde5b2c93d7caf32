"""Gradients of stages that several workers share: added up while the step goes on, in flat buckets.

Each worker has what its own micro-batches have made. Behind its last backward of a stage it copies that into buckets,
which are added up over the workers meanwhile; the step's end waits for the sums, and they become the gradients:

    worker 0    B2 B1 B0 | copy, begin |  backwards of other stages  | wait
    bucket      a  b  -  1  1  0                   no worker has a gradient of the third parameter: it gets none
    worker 1    a' -  -  1  0  0    ->  sum  a + a'  b  -  2  1  0

The marks behind the values count the workers that have a gradient: a zero in the place of one would be another thing.
Through NCCL nothing begins early: its kernels spin until all members have launched theirs, so the members meet first
(see `handshake`), and would wait there for each other in the middle of the step. There the sums begin at the step's
end, when all that this worker sends has left.

A sparse gradient (`nn.Embedding(sparse=True)`) becomes a dense one: others may have rows that this worker has not.

Source of the buckets and their size: Li et al., PyTorch Distributed, VLDB 2020 (arXiv 2006.15704), section 3.2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from assigner.runtime.workergroups import PendingTensor, WorkerGroup
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.runtime.recorder import RecordedSpan


@dataclass
class _Bucket:
    """Parameters of one type, whose gradients lie in one flat tensor, in their order.

    Args:
        parameters: By name.
        pending: Their sum, on its way.
        ended_s: When it was there, on this process's clock; of no meaning unless somebody has asked for it.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    pending: PendingTensor | None = None
    ended_s: float | None = None

    def begin(self, group: WorkerGroup, *, timed: bool) -> float:
        """Copy the gradients, drop them, and begin to add up; `timed`: note when that has ended.

        Returns:
            When the copies were made and the sum began, on this process's clock; a small sum ends before this returns.
        """
        held = list(self.parameters.values())
        flat = torch.empty(sum(each.numel() for each in held) + len(held), dtype=held[0].dtype, device=held[0].device)
        flat[-len(held) :] = torch.tensor([float(each.grad is not None) for each in held], device="cpu")
        for parameter, part in zip(held, parts_of(flat, self.parameters), strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        began_s = time.perf_counter()
        self.pending, self.ended_s = group.add_up(flat), None
        if timed:
            self.pending.when_done(self._note_end)
        return began_s

    def _note_end(self) -> None:
        self.ended_s = time.perf_counter()

    def end(self) -> torch.Tensor:
        """Wait for the sum; its values become the gradients, and its marks are given back."""
        assert self.pending is not None
        flat, self.pending = self.pending.wait(), None
        for parameter, part in zip(self.parameters.values(), parts_of(flat, self.parameters), strict=True):
            parameter.grad = part
        return flat[-len(self.parameters) :]


class Reduction:
    """The sums of this rank's gradients over the workers that hold the same stages.

    Args:
        stages: For each stage that this rank shares its number, the group, and the parameters that are added up: those
            whose gradients no exchange of shared parameters adds up already. The same on all members, in one order.
    """

    def __init__(self, stages: Mapping[int, tuple[WorkerGroup, Mapping[str, nn.Parameter]]]) -> None:
        self._groups = {stage: group for stage, (group, _) in stages.items()}
        self._buckets = {
            stage: [_Bucket(each) for each in in_buckets(parameters.items(), BUCKET_BYTES)]
            for stage, (_, parameters) in stages.items()
        }
        self._begun: list[int] = []
        self._spans: dict[int, RecordedSpan] = {}

    @property
    def names(self) -> list[str]:
        """Of all parameters that are added up."""
        return [name for held in self._buckets.values() for each in held for name in each.parameters]

    def begin(self, stage: int, span: RecordedSpan | None = None) -> None:
        """This rank's backwards of a stage are done: begin to add up its gradients; `span` gets the end of that."""
        if span is not None:
            self._spans[stage] = span
        if not self._groups[stage].direct:
            self._begin(stage)

    def begin_rest(self) -> None:
        """All backwards of the step are done, and what they send has left: begin with the stages that wait for that."""
        for stage in sorted(self._buckets.keys() - self._begun, reverse=True):
            self._begin(stage)

    def _begin(self, stage: int) -> None:
        self._begun.append(stage)
        span = self._spans.get(stage)
        began_s = [each.begin(self._groups[stage], timed=span is not None) for each in self._buckets[stage]]
        if span is not None and began_s:
            span.start_s = began_s[0]  # what was measured of sums has no copying in front of it

    def end(self) -> None:
        """Wait for all sums: parameters of the stages that were begun have the gradients of all workers.

        Raises:
            LostConnectionError: a worker is gone.
        """
        buckets = [each for stage in self._begun for each in self._buckets[stage]]
        marks = []
        for stage in self._begun:
            marks += [each.end() for each in self._buckets[stage]]
            if stage in self._spans:
                self._spans[stage].done()  # the thread that notes the end may come to it later than this one
        for stage, span in self._spans.items():
            ends = [each.ended_s for each in self._buckets[stage] if each.ended_s is not None]
            if len(ends) == len(self._buckets[stage]) > 0:
                span.end_s = max(ends)
        self._begun, self._spans = [], {}
        for each, mark in zip(buckets, marks, strict=True):
            for parameter, workers in zip(each.parameters.values(), mark.real.tolist(), strict=True):
                if not workers:
                    parameter.grad = None

    def forget(self) -> None:
        """Drop what an unfinished step has begun."""
        self._begun, self._spans = [], {}
        for held in self._buckets.values():
            for each in held:
                each.pending = None


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


def parts_of(flat: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    """The parts of a flat tensor that parameters take, in their order and shapes; more may follow in it."""
    sizes = [each.numel() for each in parameters.values()]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(each.shape) for part, each in zip(parts, parameters.values(), strict=True)]
