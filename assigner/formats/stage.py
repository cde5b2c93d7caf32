"""A stage of a plan: its partitions, on one worker, or on several that share its micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from assigner.errors import FormatError, UsageError
from assigner.formats.document import Name, Range, Threads, check_unique, left_out
from assigner.formats.terms import MOST_MICRO_BATCHES
from assigner.location import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

MicroBatches = Annotated[int, Range(1, MOST_MICRO_BATCHES)]


@dataclass(frozen=True)
class Replica:
    """One of several workers that run the same stage, each for micro-batches of its own.

    Args:
        worker: The worker's name.
        micro_batches: How many of a step's it takes; `schedule/replication.py` says which.
        threads: As a stage's.
        updates: The partitions of the stage whose optimizer state it has, and whose parameters it updates for all of
            the stage's workers; each partition is one replica's. Left out of all of them: every worker has the state of
            all and updates its own copy. Format 2.1.
    """

    worker: Name
    micro_batches: MicroBatches
    threads: Threads | None = None
    updates: tuple[Name, ...] | None = field(default=None, metadata=left_out(None))


@dataclass(frozen=True)
class Stage:
    """Partitions that run without a transfer between them, on one worker or on each of several.

    Args:
        sole_worker: The worker's name, `worker:0/cuda:0`; left out where there are `replicas`.
        partitions: Names, in the order in which they run.
        rematerialise: Those of them that keep their inputs only and run forward again before backward.
        in_flight: Warm-up depth: how many micro-batches are kept at once, by all of the stage's workers together; None:
            the schedule's default. `1f1b` alone goes by it; `listed` refuses it.
        threads: Compute threads of the worker when it was measured; the runtime sets them. None: left as they are.
        replicas: The stage's workers, where it has two or more; left out where it has one. Format 2.
    """

    sole_worker: Name | None = field(metadata=left_out(None, name="worker"))
    partitions: tuple[Name, ...]
    rematerialise: tuple[Name, ...] = ()
    in_flight: MicroBatches | None = None
    threads: Threads | None = None
    replicas: tuple[Replica, ...] = field(default=(), metadata=left_out(()))

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers that hold the stage, in the order in which the plan names them."""
        return tuple(each.worker for each in self.replicas) if self.sole_worker is None else (self.sole_worker,)

    @property
    def worker(self) -> str:
        """The worker of a stage that has one.

        Raises:
            UsageError: it has several; who asks does not carry that.
        """
        if self.sole_worker is None:
            raise UsageError(
                f"the stage of {self.partitions[0]!r} is on several workers, {', '.join(self.workers)}; not carried",
                hint="use a plan with one worker a stage: assigner solve --schedule one-stage --max-replicas 1",
            )
        return self.sole_worker

    @property
    def is_divided(self) -> bool:
        """Whether its workers divide the optimizer's state: a parameter is updated by one of them for all."""
        return any(each.updates is not None for each in self.replicas)

    def updaters(self, partition: str) -> tuple[str, ...]:
        """The workers that have the optimizer's state of one of its partitions."""
        if not self.is_divided:
            return self.workers
        return tuple(each.worker for each in self.replicas if partition in (each.updates or ()))

    def updated_by(self, worker: str) -> tuple[str, ...]:
        """Those of its partitions whose optimizer state a worker has, in their order."""
        if not self.is_divided:
            return self.partitions if worker in self.workers else ()
        mine = {name for each in self.replicas if each.worker == worker for name in each.updates or ()}
        return tuple(name for name in self.partitions if name in mine)

    def threads_of(self, worker: str) -> int | None:
        """Compute threads of one of its workers."""
        return next((each.threads for each in self.replicas if each.worker == worker), self.threads)


def scaled_shares(replicas: tuple[Replica, ...], micro_batches: int) -> tuple[Replica, ...]:
    """As many micro-batches in all, in the same proportion: the whole part, and one more by the largest remainder."""
    before = sum(each.micro_batches for each in replicas)
    if before in (0, micro_batches):
        return replicas
    whole, rest = zip(*(divmod(each.micro_batches * micro_batches, before) for each in replicas), strict=True)
    first = sorted(range(len(replicas)), key=lambda n: (-rest[n], n))[: micro_batches - sum(whole)]
    return tuple(replace(each, micro_batches=whole[n] + (n in first)) for n, each in enumerate(replicas))


def check_stages(stages: Sequence[Stage], micro_batches: int) -> None:
    """Raise FormatError unless these can be the stages of a plan: every partition once, a device a rank."""
    if not stages:
        raise FormatError("stages: empty; a plan has at least one")
    for n, stage in enumerate(stages):
        _check_workers(stage, micro_batches, f"stages[{n}]")
        if not stage.partitions:
            raise FormatError(f"stages[{n}].partitions: empty; leave the stage out")
        held = set(stage.partitions)
        strange = [name for name in stage.rematerialise if name not in held]
        if strange:
            raise FormatError(f"stages[{n}].rematerialise: {strange[0]!r} is not a partition of this stage")
        check_unique(stage.rematerialise, f"stages[{n}].rematerialise[{{}}]")
        if stage.in_flight is not None and stage.in_flight > micro_batches:
            raise FormatError(
                f"stages[{n}].in_flight: {stage.in_flight} is not allowed; a step has {micro_batches} micro-batches",
                hint="leave it out for the schedule's default",
            )
    check_unique([name for stage in stages for name in stage.partitions], "stages: partition {}")
    ranks: dict[int, str] = {}
    for worker in (worker for stage in stages for worker in stage.workers):
        rank = Location.parse(worker).rank
        if ranks.setdefault(rank, worker) != worker:
            raise FormatError(f"stages: {ranks[rank]!r} and {worker!r} have the same rank; a worker has one device")


def _check_workers(stage: Stage, micro_batches: int, where: str) -> None:
    """A stage has one worker, or two or more that share the micro-batches."""
    if stage.sole_worker is not None:
        Location.parse(stage.sole_worker, where=f"{where}.worker")
        if stage.replicas:
            raise FormatError(
                f"{where}: it has a worker and replicas", hint="name its worker, or all of its workers as replicas"
            )
        return
    if not stage.replicas:
        raise FormatError(f"{where}.worker: missing")
    for k, each in enumerate(stage.replicas):
        Location.parse(each.worker, where=f"{where}.replicas[{k}].worker")
    check_unique(stage.workers, f"{where}.replicas[{{}}].worker")
    if len(stage.replicas) == 1:
        raise FormatError(
            f"{where}.replicas: {stage.workers[0]!r} is alone", hint="a stage of one worker names it as `worker`"
        )
    total = sum(each.micro_batches for each in stage.replicas)
    if total != micro_batches:
        raise FormatError(
            f"{where}.replicas: they take {total} micro-batches in all, and a step has {micro_batches}",
            hint="each micro-batch is one replica's",
        )
    _check_updates(stage, where)
    if stage.threads is not None:
        raise FormatError(f"{where}.threads: of several workers each has its own", hint="write it beside the replica")


def _check_updates(stage: Stage, where: str) -> None:
    """Where replicas divide the optimizer's state, each partition is updated by one of them."""
    if not stage.is_divided:
        return
    held = set(stage.partitions)
    for k, each in enumerate(stage.replicas):
        place = f"{where}.replicas[{k}].updates"
        if each.updates is None:
            raise FormatError(
                f"{place}: missing, and another replica has it",
                hint="[] for a replica that updates nothing; left out of all, every one of them updates everything",
            )
        strange = [name for name in each.updates if name not in held]
        if strange:
            raise FormatError(f"{place}: {strange[0]!r} is not a partition of this stage")
    counts = Counter(name for each in stage.replicas for name in each.updates or ())
    for name in stage.partitions:
        count = counts[name]
        if count != 1:
            raise FormatError(
                f"{where}.replicas: {name!r} is in the updates of {count} of them" if count
                else f"{where}.replicas: none of them updates {name!r}",
                hint="name each partition once, in one replica's updates",
            )  # fmt: skip
