"""BatchNorm's running statistics as of the whole batch, though each micro-batch is normalised by its own.

Plain BatchNorm would move its running values at every micro-batch. Here each micro-batch leaves its mean, variance and
count aside, and the step's end merges them and moves the running values once, as one forward of the whole batch does.

Where several workers share the partition, each has the figures of its own micro-batches; before the merge all get those
of all, so that all move their running values alike.

There is no second pass over the data (deferrednorm.py); a step that fails leaves the running values as they were.

Deferred until the step's end as in Kim et al., torchgpipe, 2020 (arXiv 2004.09910), which passes over the data once
more.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from assigner.errors import UsageError
from assigner.runtime.stages.replicas import one_worker, sharers
from assigner.runtime.step.deferrednorm import BatchFigures, DeferredNorm, Move, PartitionNorms, merged, move

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.runtime.ranks.workergroups import WorkerGroup

BatchNorm = Literal["deferred", "micro_batch"]


class DeferredStatistics:
    """The running statistics of some partitions' BatchNorm modules. Those that keep none are left alone.

    Args:
        modules: The partitions; their modules are the pipeline's own copies.
        choice: "deferred"; with "micro_batch" every BatchNorm stays as torch made it.
        groups: Of the partitions that other workers hold too, those workers.

    Attributes:
        partitions: Those that have such modules, by name.

    Raises:
        UsageError: `choice` is none of the two, or a module cannot run in a pipeline.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], choice: BatchNorm, groups: Mapping[str, WorkerGroup] | None = None
    ) -> None:
        if choice not in get_args(BatchNorm):
            raise UsageError(f"batch_norm={choice!r} is not allowed", hint=f"one of {', '.join(get_args(BatchNorm))}")
        self.partitions: dict[str, PartitionNorms] = {}
        self._shared: dict[WorkerGroup, list[DeferredNorm]] = defaultdict(list)
        turns = itertools.count()
        for partition, held in modules.items():
            found = {name: each for name, each in held.named_modules() if isinstance(each, _BatchNorm)}
            group = (groups or {}).get(partition)
            for name, each in found.items():
                _check(name, each, choice)
                if group is not None and choice == "micro_batch" and each.track_running_stats:
                    raise UsageError(
                        f"{sharers(partition, group.workers)}, and with batch_norm='micro_batch' every micro-batch"
                        f" moves the running statistics of {name}: each of them would see its own alone",
                        hint=f"use batch_norm='deferred', or {one_worker(partition)}",
                    )
            deferred = {
                name: each
                for name, each in found.items()
                if choice == "deferred" and each.track_running_stats and each.running_mean is not None
            }
            if deferred:
                self.partitions[partition] = PartitionNorms(partition, deferred, turns)
                if group is not None:
                    self._shared[group] += self.partitions[partition].norms

    def exchange(self, micro_batches: int) -> None:
        """A step's forwards have run, of so many micro-batches on all workers: have each worker know of all of them.

        Raises:
            LostConnectionError: a worker that shares a partition is gone.
        """
        for group, shared in self._shared.items():
            _exchange(group, shared, micro_batches)

    @torch.no_grad()
    def commit(self) -> None:
        """A step's forwards have run: move the running values, once for each call that a forward makes."""
        norms = [each for some in self.partitions.values() for each in some.norms]
        storages = [each.own_storages() for each in norms]
        holders = Counter(itertools.chain.from_iterable(storages))
        shared = [each for each, held in zip(norms, storages, strict=True) if any(holders[n] > 1 for n in held)]
        alone = [each for each in norms if each not in shared]
        for call in range(max((len(each.seen) for each in alone), default=0)):
            _move_together(alone, call)
        turns = [(each.turn(call), each, call) for each in shared for call in range(len(each.seen))]
        for _, each, call in sorted(turns, key=itemgetter(0)):
            _move_together([each], call)
        self.forget()

    def forget(self) -> None:
        """The step is over, or has failed: the running values stay as they are."""
        if used := [tensor for norms in self.partitions.values() for tensor in norms.forget()]:
            torch._foreach_zero_(used)


def _move_together(norms: Sequence[DeferredNorm], call: int) -> None:
    """Move the running values of modules, each of which has its own, by what one call of each has seen."""
    alike = defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[DeferredNorm, list[BatchFigures]]]](list)
    for norm in norms:
        if found := norm.found(call):
            alike[len(found), found[0].mean.dtype, found[0].mean.device].append((norm, found))
    together = defaultdict[tuple[float | None, torch.device], list[Move]](list)
    for some in alike.values():
        for (norm, _), (mean, variance) in zip(some, merged([found for _, found in some]), strict=True):
            together[norm.momentum(call), mean.device].append((norm.module, mean, variance))
    for (momentum, _), moves in together.items():
        move(moves, momentum)


@torch.no_grad()
def _exchange(group: WorkerGroup, norms: Sequence[DeferredNorm], micro_batches: int) -> None:
    """Have each worker of a group get the figures that the others have: every micro-batch is one worker's."""
    calls = group.largest(torch.tensor([len(norm.twins) for norm in norms], device=group.device))
    packed = []
    for norm, count in zip(norms, calls.tolist(), strict=True):
        norm.have_twins(count)
        packed.append(norm.packed(micro_batches))
    total = group.add_up(torch.cat([rows.flatten() for rows in packed])).wait()
    parts = torch.split(total, [rows.numel() for rows in packed])
    for norm, rows, part in zip(norms, packed, parts, strict=True):
        norm.unpack(part.view_as(rows))


def _check(name: str, module: _BatchNorm, choice: BatchNorm) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise UsageError(
            f"{name} is a SyncBatchNorm: it would wait for the ranks that hold other partitions",
            hint="use BatchNorm; with batch_norm='deferred' its running statistics are those of the whole batch",
        )
    if choice == "deferred" and "forward" in module.__dict__:
        raise UsageError(
            f"{name} has a forward of its own set on the object: its statistics cannot be deferred",
            hint="override forward in a class, or use batch_norm='micro_batch'",
        )
