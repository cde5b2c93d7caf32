"""Updated parameters on their way to the other workers of a stage, of which each updates some for all of them.

    worker 0    U: a b   a a ->      -> c     bucket by bucket, as many at once as there are workers
    worker 1    U: c     -> a a      c ->

What travels is the parameter itself, so all workers have the same bits, whatever each of them computes with. Behind
an optimizer whose step changes gradients, as one that clips them in place, these travel as the parameters do.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from assigner.runtime.stages.reduction import copy_gradients, in_buckets, parts_of
from assigner.runtime.stages.updaters import updaters
from assigner.schedule.program import Action, ActionKind
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.ranks.workergroups import PendingTensor, WorkerGroup
    from assigner.runtime.recording.recorder import Recorder
    from assigner.runtime.stages.localpartitions import LocalPartitions

Bucket = dict[str, "nn.Parameter"]


class Gathering:
    """What this rank and others hand each other behind an update, of each stage whose updates they divide."""

    def __init__(self, share: LocalPartitions, member: Membership) -> None:
        self._member = member
        self._groups: dict[int, WorkerGroup] = {}
        self._rounds: dict[int, list[tuple[tuple[str, Bucket], ...]]] = {}
        graph, by = share.graph, updaters(share.graph, share.plan)
        for n, stage in enumerate(share.plan.stages):
            group = member.groups.get(stage.workers)
            if group is None or not stage.is_divided:
                continue
            held = (each for partition in stage.partitions for each in graph.piece[partition].parameters)
            names = [name for name in dict.fromkeys(map(graph.canonical.__getitem__, held)) if len(by[name]) == 1]
            buckets = []
            for worker in group.workers:
                updated = [(name, share.parameters[name]) for name in names if by[name][0] == worker]
                cut = in_buckets(updated, BUCKET_BYTES // len(group.workers))
                buckets.append([(worker, each) for each in cut])
            self._groups[n] = group
            self._rounds[n] = [tuple(filter(None, each)) for each in itertools.zip_longest(*buckets)]

    def run(self, recorder: Recorder | None, *, gradients: bool = False) -> None:
        """Send what this worker has updated, and take over what others have; gradients too where these change.

        Raises:
            LostConnectionError: a worker is gone.
        """
        for stage in sorted(self._rounds, reverse=True):
            self._member.at = f"the exchange of the updated parameters of stage {stage} among its workers"
            span = None if recorder is None else recorder.begin(Action(ActionKind.GATHER, stage, -1))
            for buckets in self._rounds[stage]:
                self._exchange(stage, buckets)
                if gradients:
                    self._exchange(stage, buckets, gradients=True)
            if span is not None:
                span.done()

    def _exchange(self, stage: int, buckets: Sequence[tuple[str, Bucket]], *, gradients: bool = False) -> None:
        """Hand out a bucket of each worker: of its parameters, or of their gradients."""
        begun: list[PendingTensor] = []
        worker = self._member.name
        for source, bucket in buckets:
            held = list(bucket.values())
            size = sum(each.numel() for each in held) + (len(held) if gradients else 0)
            flat = torch.empty(size, dtype=held[0].dtype, device=held[0].device)
            if source == worker:
                if gradients:
                    copy_gradients(bucket, flat)
                else:
                    torch._foreach_copy_(parts_of(flat, bucket), [each.detach() for each in held])
            begun.append(self._groups[stage].hand_out(flat, source))
        for (source, bucket), pending in zip(buckets, begun, strict=True):
            flat = pending.wait()
            if source != worker and gradients:
                _take_gradients(bucket, flat)
            elif source != worker:
                torch._foreach_copy_([each.detach() for each in bucket.values()], parts_of(flat, bucket))


def _take_gradients(bucket: Bucket, flat: torch.Tensor) -> None:
    marks = flat[-len(bucket) :].real.tolist()
    for parameter, part, mark in zip(bucket.values(), parts_of(flat, bucket), marks, strict=True):
        if not mark:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = part.clone()
        else:
            parameter.grad.detach().copy_(part)
