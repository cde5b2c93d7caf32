"""BatchNorm's running statistics as of the whole batch, though each micro-batch is normalised by its own.

Plain BatchNorm would move its running values at every micro-batch. Here each micro-batch leaves its mean, variance and
count aside, and the step's end merges them and moves the running values once, as one forward of the whole batch does
(batchfigures.py).

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
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from assigner.errors import UsageError
from assigner.runtime.stages.replicas import one_worker, sharers
from assigner.runtime.step.batchfigures import BatchFigures, Move, merged, move
from assigner.runtime.step.deferrednorm import MICRO_BATCH, DeferredNorm, NormBackward

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from assigner.runtime.ranks.workergroups import WorkerGroup

BatchNorm = Literal["deferred", "micro_batch"]


class DeferredStatistics:
    """The running statistics of some partitions' BatchNorm modules. Those that keep none are left alone.

    Args:
        modules: The partitions; their modules are the pipeline's own copies.
        choice: "deferred"; with "micro_batch" every BatchNorm stays as torch made it.
        groups: Of the partitions that other workers hold too, those workers.

    Raises:
        UsageError: `choice` is none of the two, or a module cannot run in a pipeline.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], choice: BatchNorm, groups: Mapping[str, WorkerGroup] | None = None
    ) -> None:
        if choice not in get_args(BatchNorm):
            raise UsageError(f"batch_norm={choice!r} is not allowed", hint=f"one of {', '.join(get_args(BatchNorm))}")
        self._norms: dict[str, list[DeferredNorm]] = {}
        self._backwards: dict[str, NormBackward] = defaultdict(NormBackward)
        turns = itertools.count()
        for partition, held in modules.items():
            found = {name: each for name, each in held.named_modules() if isinstance(each, _BatchNorm)}
            for name, each in found.items():
                _check(name, each, choice)
                if groups and partition in groups and choice == "micro_batch" and each.track_running_stats:
                    _refuse_shared(partition, groups[partition].workers, name)
            if choice == "deferred":
                tracking = {name: each for name, each in found.items() if each.track_running_stats}
                self._norms[partition] = [
                    DeferredNorm(each, name, self._backwards[partition], turns)
                    for name, each in tracking.items()
                    if each.running_mean is not None
                ]
        self._shared: dict[WorkerGroup, list[DeferredNorm]] = {}
        for partition, group in (groups or {}).items():
            if self._norms.get(partition):
                self._shared.setdefault(group, []).extend(self._norms[partition])

    def has(self, partition: str) -> bool:
        """Whether a partition's forwards are part of them."""
        return bool(self._norms.get(partition))

    def run_eagerly(self, partition: str) -> None:
        """A partition is compiled, but for BatchNorms with forwards of the user's own."""
        for norm in self._norms.get(partition, ()):
            norm.run_eagerly()

    def begin(self, partition: str, micro_batch: int) -> None:
        """A forward of this micro-batch comes next, or its recompute."""
        for norm in self._norms.get(partition, ()):
            norm.begin(micro_batch)

    def end(self, partition: str) -> None:
        """That forward has run.

        Raises:
            UsageError: it has put other tensors in the places of running statistics.
        """
        for norm in self._norms.get(partition, ()):
            if not norm.end():
                _refuse_use(partition, "assigns", norm.name)

    def begin_backward(self, partition: str, micro_batch: int) -> None:
        """The backward of this micro-batch comes next, in which a checkpoint may run parts of the forward."""
        self._backwards[partition].micro_batch = micro_batch

    def end_backward(self, partition: str) -> None:
        """That backward has run; errors as `end`."""
        backward = self._backwards[partition]
        begun, backward.begun, backward.micro_batch = backward.begun, [], None
        for norm in begun:
            if not norm.end():
                _refuse_use(partition, "assigns", norm.name)

    def check_used(self, partition: str, storages: Collection[int]) -> None:
        """A forward of a partition has given these storages to operations that are no BatchNorm's.

        Raises:
            UsageError: running statistics are among them.
        """
        for norm in self._norms.get(partition, ()):
            if not norm.storages().isdisjoint(storages):
                _refuse_use(partition, "uses", norm.name)

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
        norms = [each for some in self._norms.values() for each in some]
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
        for backward in self._backwards.values():
            backward.micro_batch, backward.begun = None, []
        if used := [tensor for norms in self._norms.values() for norm in norms for tensor in norm.forget()]:
            torch._foreach_zero_(used)


def _refuse_use(partition: str, does: str, name: str) -> NoReturn:
    raise UsageError(
        f"the forward of partition {partition!r} {does} the running statistics of {name}, which are the whole batch's:"
        " they are known at the end",
        hint=MICRO_BATCH,
    )


def _refuse_shared(partition: str, workers: Sequence[str], name: str) -> NoReturn:
    raise UsageError(
        f"{sharers(partition, workers)}, and with batch_norm='micro_batch' every micro-batch moves the running"
        f" statistics of {name}: each of them would see its own alone",
        hint=f"use batch_norm='deferred', or {one_worker(partition)}",
    )


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
