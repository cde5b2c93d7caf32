"""The profile: what was measured of a workload's partitions, its workers and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from assigner.formats.document import Count, Name, Range, Share, Threads, read, write
from assigner.formats.fineness import Fineness
from assigner.formats.graph import topological_order
from assigner.formats.profilechecks import check_profile
from assigner.formats.screen import OnScreen
from assigner.location import rank_name, rank_of
from assigner.machine.reference import ReferenceTimes

if TYPE_CHECKING:
    from assigner.samples import Samples

VERSIONS = ("1.5",)


@dataclass(frozen=True)
class WorkloadReference:
    """Which workload was measured.

    Args:
        name: For tables.
        entry: What made it, `FILE.py:FUNCTION` with its arguments.
        fingerprint: Changes with the partitions and their graph; a plan and a checkpoint are refused where it differs.
        batch_size: Rows in a step.
        dtype: Of the parameters.
        optimizer: The class of the optimizer.
        max_micro_batches: The most that the workload allows a step to have; None: any number.
        min_rows: The fewest rows that it allows a micro-batch to have, where a batch is cut; None: any number.
        per_micro_batch: What sees each micro-batch by itself, in words: their number changes what is trained.
        inputs: Types and shapes of the model's inputs for 4 rows; empty: nobody has noted them.
    """

    name: Name
    entry: Name = ""
    fingerprint: Name = ""
    batch_size: Count = 1
    dtype: Name = "float32"
    optimizer: Name = ""
    max_micro_batches: Count | None = None
    min_rows: Count | None = None
    per_micro_batch: tuple[Name, ...] = ()
    inputs: Name = ""

    @property
    def label(self) -> str:
        """Its name and the beginning of its fingerprint."""
        return f"{self.name!r} ({self.fingerprint[:15] or 'no fingerprint'})"

    @property
    def fineness(self) -> Fineness:
        """How finely its batches may be cut."""
        return Fineness(self.max_micro_batches, self.min_rows)


@dataclass(frozen=True)
class Worker:
    """One process with one device. Workers of one `kind` and thread count share measurements.

    Args:
        name: `worker:RANK/DEVICE`.
        kind: The device's model.
        host: Where it is.
        device: `cpu` or `cuda:N`.
        memory_bytes: What is free for training after start-up.
        threads: Compute threads.
        reserve_bytes: What plans leave alone.
        cost_per_hour: Its price, in any currency.
        allocator_share: What its allocator takes beyond the bytes of the tensors in it, as a share of them.
        reference: How fast it did fixed pieces of work while it was measured; None: nobody looked.
        slower: How many times as long it computed while it was measured as it would with the other workers of its host
            idle, for they have fewer cores than threads.
    """

    name: Name
    kind: Name
    host: Name
    device: Name
    memory_bytes: float
    threads: Threads = 1
    reserve_bytes: float = 0
    cost_per_hour: float | None = None
    allocator_share: float = 0.0
    reference: ReferenceTimes | None = None
    slower: Annotated[float, Range(1)] = 1.0

    @property
    def capacity_bytes(self) -> float:
        """What a plan may use of the worker's memory, in bytes."""
        return max(0, self.memory_bytes - self.reserve_bytes)

    @property
    def tensor_bytes(self) -> float:
        """How many bytes of tensors fit into that."""
        return self.capacity_bytes / (1 + self.allocator_share)

    @property
    def alike(self) -> tuple[str, int]:
        """Its kind and its thread count, by which workers share measurements."""
        return self.kind, self.threads

    @property
    def rank(self) -> int:
        """The worker's rank in a run."""
        return rank_of(self.name)


@dataclass(frozen=True)
class LinkPoint:
    """The one-way time of one message of one size, or the time of one all-reduce.

    Args:
        bytes: Of the message; of an all-reduce, of the tensor that each worker adds.
        seconds: The median.
        samples: How many were timed; 0: none on this link, the median of links of its class.
        spread: IQR / median; of a link that was not measured, over those links.
    """

    bytes: float
    seconds: float
    samples: int = 1
    spread: float = 0.0

    @classmethod
    def of(cls, size: float, samples: Samples) -> LinkPoint:
        """What was timed of messages or tensors of one size, in bytes."""
        return cls(size, samples.median_s, len(samples.seconds), samples.spread)


@dataclass(frozen=True)
class Link:
    """The directed way from one worker to another, as a sweep over message sizes.

    Args:
        source: The worker that sends.
        target: The worker that receives.
        points: Times by message size, the smallest first.
        backend: What carries the messages: `gloo`, `nccl` or `mpi`.
        sender_busy: Share of a transfer's time in which the sender cannot compute.
        receiver_busy: The same for the receiver.
        starved: Share of its ends' processor time that other programs had while it was measured: of the end that lost
            more.
        sender_s: Seconds in which the sender cannot compute beside that, for each message, whatever its size.
        receiver_s: The same for the receiver.
    """

    source: str
    target: str
    points: tuple[LinkPoint, ...]
    backend: Name = "gloo"
    sender_busy: Share = 0.0
    receiver_busy: Share = 0.0
    starved: Share = 0.0
    sender_s: float = 0.0
    receiver_s: float = 0.0


@dataclass(frozen=True)
class Collective:
    """All-reduces among some workers, as a sweep over sizes: each adds a tensor, and all get the sum.

    Args:
        workers: Who takes part, two or more.
        points: Times by size, the smallest first.
        backend: What carries it: `gloo` or `nccl`.
        busy: Share of its time in which a worker cannot compute: of the one that loses most.
        starved: Share of its workers' processor time that other programs had while it was measured: of the worker that
            lost most.
    """

    workers: tuple[str, ...]
    points: tuple[LinkPoint, ...]
    backend: Name = "gloo"
    busy: Share = 0.0
    starved: Share = 0.0


@dataclass(frozen=True)
class WireLink:
    """One of the links that share a wire.

    Args:
        source: The worker that sends.
        target: The worker that receives.
    """

    source: Name
    target: Name


@dataclass(frozen=True)
class Wire:
    """What several directed links go over, and divide when their messages are under way at once.

    Args:
        links: Two or more.
        slower: How many times as long a message takes when all of them send at once.
    """

    links: tuple[WireLink, ...]
    slower: Annotated[float, Range(1)]

    @property
    def share(self) -> float:
        """The part of a message's time on its link for which the wire takes no other; 1 at most: one at a time."""
        return min(1.0, self.slower / len(self.links))


@dataclass(frozen=True)
class Partition:
    """A unit that the user marked. Partitions of one `kind` share measurements.

    Args:
        name: Its name in a plan.
        kind: Structure and input shape.
        parameter_bytes: Of its parameters.
        gradient_bytes: Of their gradients.
        optimizer_bytes: Of the optimizer's state.
        buffer_bytes: Of its buffers.
        pin: The worker, kind or host that it must be on.
        colocate: Partitions with the same label share a worker.
        apart: No two partitions with the same label share a worker.
        rematerialise: "never" or "always", which counts before `--remat`; None: as the solver likes.
        one_worker: Why several workers cannot share it, in words; None: they can, as far as is known.
    """

    name: Name
    kind: Name
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    buffer_bytes: float = 0
    pin: Name | None = None
    colocate: Name | None = None
    apart: Name | None = None
    rematerialise: Literal["never", "always"] | None = None
    one_worker: Name | None = None


@dataclass(frozen=True)
class Edge:
    """A value that one partition makes and another reads.

    Args:
        source: The partition that makes it.
        target: The partition that reads it.
        bytes_per_sample: Of the value, for each sample of a micro-batch.
        output: Which of the source's values it is; edges with the same one carry the same value, once to each worker.
        fixed_bytes: Of the value, whatever the micro-batch.
        gradient: Whether its gradient comes back.
    """

    source: str
    target: str
    bytes_per_sample: float
    output: int = 0
    fixed_bytes: float = 0
    gradient: bool = True


@dataclass(frozen=True)
class Tie:
    """One parameter that several partitions hold.

    Args:
        parameter: Its first name in the model.
        partitions: Those that hold it.
        bytes: Of the parameter, and of a message with its gradient.
    """

    parameter: str
    partitions: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class Measurement:
    """One partition on one worker at one micro-batch size; times are medians, in seconds.

    Args:
        partition: Its name.
        worker: The worker's name.
        micro_batch: In samples.
        forward_s: Of one forward.
        backward_s: Of one backward.
        update_s: Of the optimizer's update of this partition.
        activation_bytes: What it keeps from forward to backward, its inputs and outputs left out.
        workspace_bytes: What it needs beside that while it computes.
        samples: How many times it was timed.
        spread: IQR / median of forward or backward, whichever is wider.
        infeasible: Why it could not be measured, as for lack of memory; it is not placed there then.
        update_spread: IQR / median of the update.
        recompute_s: How much longer forward and backward take together where the partition rematerialises; None: as
            long as a forward.
        starved: Share of its worker's processor time that other programs had while it was timed.
        backward_input_s: Of the input part of a backward that runs in two; None: nobody has measured the parts.
        backward_weight_s: Of the weight part.
        waiting_bytes: What it keeps from the input part to the weight part, its inputs left out.
    """

    partition: str
    worker: str
    micro_batch: Count
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    activation_bytes: float = 0
    workspace_bytes: float = 0
    samples: int = 1
    spread: float = 0.0
    infeasible: str | None = None
    update_spread: float = 0.0
    recompute_s: float | None = None
    starved: Share = 0.0
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    waiting_bytes: float | None = None

    @property
    def parts(self) -> tuple[float, float, float] | None:
        """Seconds of the input and of the weight part of a backward, and the bytes between them, where all are known.

        None: they are not.
        """
        found = self.backward_input_s, self.backward_weight_s, self.waiting_bytes
        return None if None in found else found  # type: ignore[return-value]

    def with_backwards(self, factor: float) -> Measurement:
        """The measurement with backwards, and their parts, of `factor` times their seconds."""
        return replace(
            self,
            backward_s=self.backward_s * factor,
            backward_input_s=None if self.backward_input_s is None else self.backward_input_s * factor,
            backward_weight_s=None if self.backward_weight_s is None else self.backward_weight_s * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How the captured partitions were held against the model as it is, and what came of it.

    Args:
        result: `equal`: they compute the same; `uncertain`: the model differs from itself in two equal runs, so that
            nothing can be said.
        exact: Equal to the last bit; else within what rounding explains.
        way: `whole`: all partitions together against the whole model; `pieces`: for lack of memory one partition at a
            time, and forwards alone.
        partitions: How many were compared.
        rows: In a batch.
        micro_batches: Of a batch.
        trained: False: outputs alone were compared, for lack of memory, or for there is no loss or no optimizer.
        seconds: What it took.
        cautions: What else a plan may change.
        per_micro_batch: What sees each micro-batch by itself, in words.
        moving: The partitions of which a buffer moves with every micro-batch.
    """

    result: Literal["equal", "uncertain"]
    exact: bool = False
    way: Literal["whole", "pieces"] = "whole"
    partitions: Count = 1
    rows: Count = 1
    micro_batches: Count = 1
    trained: bool = True
    seconds: float = 0.0
    cautions: tuple[str, ...] = ()
    per_micro_batch: tuple[Name, ...] = ()
    moving: tuple[Name, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile(OnScreen):
    """A whole profile; construction checks that every reference in it resolves.

    Args:
        kind: What the file is.
        format_version: MAJOR.MINOR; a reader takes every minor version of a major that it knows.
        created_at: When, in UTC.
        tool_version: The release that wrote it.
        environment: Versions, devices and settings of the measurement, for people.
        workload: What was measured.
        workers: The processes, each with one device.
        links: The ways between them; a pair that is not here cannot talk.
        wires: Which links share a wire, each link in one at most; a link that is in none has a wire of its own.
        collectives: All-reduces among some of them, which correct what their links say of one; each set once.
        partitions: The units that are placed.
        edges: The values between them; no cycles.
        ties: Parameters that several partitions hold.
        measurements: Times and bytes; a pair of partition and worker without one is not placed.
        warnings: What was suspicious while it was measured.
        verification: How its partitions were compared with the model as it is; None: they were not.

    Raises:
        FormatError: a name stands twice, a reference leads nowhere, or the graph has a cycle.
    """

    kind: Literal["profile"] = "profile"
    format_version: str = VERSIONS[0]
    created_at: str = ""
    tool_version: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    workload: WorkloadReference
    workers: tuple[Worker, ...]
    links: tuple[Link, ...]
    wires: tuple[Wire, ...] = ()
    collectives: tuple[Collective, ...] = ()
    partitions: tuple[Partition, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()
    measurements: tuple[Measurement, ...]
    warnings: tuple[str, ...] = ()
    verification: Verification | None = None

    def __post_init__(self) -> None:
        check_profile(self)

    @cached_property
    def worker(self) -> dict[str, Worker]:
        """Workers by name."""
        return {worker.name: worker for worker in self.workers}

    @cached_property
    def link(self) -> dict[tuple[str, str], Link]:
        """Links by source and target."""
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def partition(self) -> dict[str, Partition]:
        """Partitions by name."""
        return {partition.name: partition for partition in self.partitions}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Partition names in topological order; the file's own order wherever that is one."""
        names = [partition.name for partition in self.partitions]
        return topological_order(names, [(edge.source, edge.target) for edge in self.edges])

    @cached_property
    def is_chain(self) -> bool:
        """True where every value goes from one partition to the next and to no other."""
        following = dict(zip(self.order, self.order[1:], strict=False))
        return all(following.get(edge.source) == edge.target for edge in self.edges) and not self.ties

    def matches(self, pin: str, worker: Worker) -> bool:
        """True if `pin` (a worker's name, its rank as `worker:1`, a kind or a host) allows `worker`."""
        return pin in (worker.name, worker.kind, worker.host, rank_name(worker.name))


def load_profile(path: Path | str) -> Profile:
    """Read and check a profile file.

    Raises:
        UsageError: the file cannot be read.
        FormatError: it is not a sound profile; the message names file, place, value and what is allowed.
    """
    return read(Path(path), Profile, name="profile", versions=VERSIONS)


def save_profile(profile: Profile, path: Path | str, *, force: bool = False) -> None:
    """Write a profile; an existing file is replaced only with `force`.

    Raises:
        UsageError: the file exists, or its folder does not.
    """
    write(Path(path), profile, force=force)
