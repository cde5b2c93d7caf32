"""Messages from GPU to GPU through NCCL, between ranks that each have a GPU for themselves.

NCCL wants a device of its own for every rank, knows no tags, and makes the ranks of a communicator wait for each other
when it is made. So each channel, one way between two ranks, has a communicator and a stream of its own, and passes
messages in the order that both ends derive from the program (see `ordering`). All are made and tried out by all ranks
in one order, before the first message of a program: a rank that made its own on first use could wait in a circle.
No message is launched before its two ends have agreed on it: see `handshake`.

Channels of a GPU must not share a hardware queue: a receive that waits would hold up the computing behind it. So CUDA
gets as many queues as it has.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.location import Location, rank_of
from assigner.runtime.messages.ordering import Posting, sending_orders
from assigner.runtime.messages.rendezvous import all_gather
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from assigner.formats.plan import Plan
    from assigner.formats.terms import Backend
    from assigner.runtime.messages.ordering import Message
    from assigner.schedule.program import Program, Route

GROUP_BACKEND = "nccl"

_ORDERED = (Payload.ACTIVATION, Payload.GRADIENT, Payload.TIE)  # what programs send and receive
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_QUEUES = "32"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check_workers(plan: Plan, backend: Backend | None) -> None:
    """Raise UsageError where NCCL is asked for, and a worker is no GPU."""
    for worker in plan.workers if backend == "nccl" else ():
        if not Location.parse(worker).device.startswith("cuda"):
            raise UsageError(
                f"backend 'nccl': {worker} is no GPU", hint="leave it out: NCCL is used wherever it can be"
            )


def alone_on_theirs(devices: Mapping[int, str]) -> frozenset[int]:
    """The ranks that share their device with no other one."""
    ranks = Counter(devices.values())
    return frozenset(rank for rank, device in devices.items() if ranks[device] == 1)


def direct_ranks(workers: Sequence[str], device: torch.device, backend: Backend | None) -> frozenset[int]:
    """The ranks whose messages to each other go through NCCL. Every rank calls this at the same time.

    Raises:
        UsageError: every worker was asked to use NCCL, and one cannot; all ranks raise it.
    """
    cuda = [worker for worker in workers if Location.parse(worker).device.startswith("cuda")]
    if backend in ("gloo", "mpi") or len(cuda) < 2:
        return frozenset()
    told = all_gather(str, _device_name(device))
    devices = {rank_of(worker): told[rank_of(worker)] or worker for worker in cuda}
    alone = alone_on_theirs(devices)
    if backend == "nccl" and len(alone) < len(cuda):
        shared = next(worker for worker in cuda if rank_of(worker) not in alone)
        raise UsageError(
            f"backend 'nccl': {shared} shares its GPU with another rank",
            hint="leave it out: messages then go through the host where ranks share a GPU",
        )
    return alone if len(alone) > 1 and all(told) else frozenset()


def _device_name(device: torch.device) -> str:
    """What tells a GPU from every other one of all hosts; slices of one GPU have one name. Empty: no NCCL here."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return "" if device.type == "cuda" else "cpu"
    facts = torch.cuda.get_device_properties(device)
    places = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in places or not _BOOT_ID.exists():
        return str(facts.uuid)
    return f"{_BOOT_ID.read_text().strip()} {places}"


def use_many_queues() -> None:
    """Called before CUDA starts in this process: see the module."""
    os.environ.setdefault(_QUEUES, _MOST_QUEUES)


def aborted(groups: Iterable[dist.ProcessGroup]) -> bool:
    """End what is on its way in groups of NCCL's, and them with it; False: this torch cannot, or all are left."""
    end = getattr(dist.distributed_c10d, "_abort_process_group", None)  # torch has no public one
    if end is None or not dist.is_initialized():
        return False
    for group in groups:
        with suppress(RuntimeError):  # it has failed already; leaving the world group ends what is left
            end(group)
    return True


class DirectChannels:
    """The channels of this rank."""

    def __init__(self, ranks: frozenset[int], *, device: torch.device, timeout: timedelta) -> None:
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self.rank = dist.get_rank()
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._carried: dict[Route, bool] = {}
        self._postings: dict[int, tuple[Program, Posting]] = {}
        self._posting: Posting | None = None

    def open(self, routes: Iterable[Route]) -> None:
        """Make the channels that a program's routes need. Every rank of the run calls this with the same routes.

        A value that a header with its shape goes before is not carried: its receiver learns the shape late, and cannot
        post in the channel's order. One that gets its first header in a later program is not carried from then on.
        """
        routes = tuple(routes)
        unshaped = {(each.partition, each.output) for each in routes if each.payload is Payload.SHAPE}
        for route, carried in self._carried.items():
            if carried and route.payload is not Payload.TIE and (route.partition, route.output) in unshaped:
                self._carried[route] = False
                self._postings.clear()
        for route in routes:
            known = route.payload is Payload.TIE or (route.partition, route.output) not in unshaped
            ends = rank_of(route.source), rank_of(route.target)
            if self._carried.setdefault(route, known and route.payload in _ORDERED and self.ranks.issuperset(ends)):
                self._make(*ends)

    def _make(self, source: int, target: int) -> None:
        if (source, target) not in self._groups:
            group = dist.new_group(sorted((source, target)), timeout=self.timeout, backend=GROUP_BACKEND)
            assert group is not None
            self._groups[source, target] = group
            if self.rank in (source, target):
                self._try_out(source, target)

    def _try_out(self, source: int, target: int) -> None:
        """One byte, waited for: the communicator is there when it has arrived."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        work = self._start(byte, source, target)
        self.wait(work)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def carries(self, route: Route) -> bool:
        """Whether a route's messages pass here."""
        return self._carried.get(route, False)

    def begin(self, program: Program) -> None:
        """A program starts: its messages pass in its order."""
        if id(program) not in self._postings:
            self._postings[id(program)] = program, Posting(sending_orders(program, self.carries))
        self._posting = self._postings[id(program)][1]
        self._posting.start_over()

    def due(self, message: Message) -> Sequence[Message]:
        """See `Posting.due`."""
        assert self._posting is not None
        return self._posting.due(message)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor to arrive in."""
        with self._beside():
            return torch.empty(shape, dtype=dtype, device=self.device)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _beside(self) -> AbstractContextManager[object]:
        """On a stream that nothing is computed on: what is launched there waits for no computing."""
        return torch.cuda.stream(self._stream) if self.device.type == "cuda" else nullcontext()

    def start(self, message: Message, tensor: torch.Tensor) -> dist.Work | None:
        """Launch a message's send or receive, which its two ends have agreed on; None: there is nothing in it.

        Args:
            message: Which.
            tensor: Contiguous; one that is sent has been computed, one that is received is a `buffer`.
        """
        if not tensor.numel():
            return None
        with self._beside():
            return self._start(
                tensor.view(-1).view(torch.uint8), rank_of(message.route.source), rank_of(message.route.target)
            )

    def _start(self, data: torch.Tensor, source: int, target: int) -> dist.Work:
        """NCCL has no name for some of torch's types: bytes it is."""
        start, peer = (dist.isend, target) if self.rank == source else (dist.irecv, source)
        work = start(data, peer, group=self._groups[source, target])
        assert work is not None
        return work

    def arrived(self, work: dist.Work | None, buffer: torch.Tensor) -> torch.Tensor:
        """A received tensor; what this rank computes next waits for it."""
        if work is not None:
            self.wait(work)
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(self.device))
        return buffer

    def wait(self, work: dist.Work) -> None:
        """Let what this rank's device does next wait for a message; a CPU waits for it at once."""
        if self.device.type == "cuda":
            work.wait()
        else:
            work.wait(self.timeout)

    def abort(self) -> None:
        """End what is on its way, and the groups with it: without their peers they would be waited for.

        What is under way ends then, so that the device and the threads that wait for it come free.
        """
        mine = [group for channel, group in self._groups.items() if self.rank in channel]
        if self.device.type == "cuda" and aborted(mine):
            self._groups.clear()

    def close(self) -> None:
        """Leave the groups, where the world group has not been left with them in it."""
        if dist.is_initialized():
            for channel, group in self._groups.items():
                if self.rank in channel:
                    dist.destroy_process_group(group)
        self._groups.clear()
