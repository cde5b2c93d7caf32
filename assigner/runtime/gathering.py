"""Updated parameters on their way to the other workers of a stage, of which each updates some for all of them.

    worker 0    U: a b   a a ->      -> c     bucket by bucket, as many at once as there are workers
    worker 1    U: c     -> a a      c ->

What travels is the parameter itself, so all workers have the same bits, whatever each of them computes with.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from assigner.runtime.reduction import in_buckets, parts_of
from assigner.schedule.program import Action, ActionKind
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from assigner.runtime.recorder import Recorder
    from assigner.runtime.workergroups import PendingTensor, WorkerGroup

Bucket = dict[str, "nn.Parameter"]


class Gathering:
    """What this rank and others hand each other behind an update.

    Args:
        stages: For each stage whose updates are divided its number, the group, and by worker of the group the
            parameters that it updates for all. The same on all members, in one order.
    """

    def __init__(self, stages: Mapping[int, tuple[WorkerGroup, Mapping[str, Mapping[str, nn.Parameter]]]]) -> None:
        self._groups = {stage: group for stage, (group, _) in stages.items()}
        self._rounds: dict[int, list[tuple[tuple[str, Bucket], ...]]] = {}
        for stage, (group, parameters) in stages.items():
            most = BUCKET_BYTES // len(group.workers)
            buckets = [
                [(worker, each) for each in in_buckets(parameters[worker].items(), most)] for worker in group.workers
            ]
            self._rounds[stage] = [tuple(filter(None, each)) for each in itertools.zip_longest(*buckets)]

    def run(self, worker: str, recorder: Recorder | None, *, note: Callable[[str], None]) -> None:
        """Send what this worker has updated, and take over what the others have.

        Args:
            worker: This rank's.
            recorder: Notes it, while a trace is made.
            note: Told what is being done, for errors.

        Raises:
            LostConnectionError: a worker is gone.
        """
        for stage in sorted(self._rounds, reverse=True):
            note(f"the exchange of the updated parameters of stage {stage} among its workers")
            span = None if recorder is None else recorder.begin(Action(ActionKind.GATHER, stage, -1))
            for buckets in self._rounds[stage]:
                begun = [self._begin(stage, source, bucket, worker) for source, bucket in buckets]
                for (source, bucket), pending in zip(buckets, begun, strict=True):
                    flat = pending.wait()
                    if source != worker:
                        for parameter, part in zip(bucket.values(), parts_of(flat, bucket), strict=True):
                            parameter.detach().copy_(part)
            if span is not None:
                span.done()

    def _begin(self, stage: int, source: str, bucket: Bucket, worker: str) -> PendingTensor:
        """Begin to hand out one worker's bucket."""
        held = list(bucket.values())
        flat = torch.empty(sum(each.numel() for each in held), dtype=held[0].dtype, device=held[0].device)
        if source == worker:
            for parameter, part in zip(held, parts_of(flat, bucket), strict=True):
                part.copy_(parameter.detach())
        return self._groups[stage].hand_out(flat, source)
