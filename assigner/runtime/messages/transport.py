"""Messages between workers: one tag for each route and micro-batch, receives posted ahead, sends freed when done.

gloo moves a message once both sides have posted it, in threads of its own. So a receive is posted two micro-batches
before it is needed, and runs while the worker computes; what is sent is kept until it has left (see `sending`).

    from, to                                            way
    CPU, CPU                                            gloo
    all of them, where it is asked for                  MPI (`mpi`), in the place of gloo, shared memory and NCCL
    CPU, CPU of one host and network, from 1 MiB        memory that both have mapped (`hostmemory`)
    GPU, CPU or CPU, GPU                                gloo, through pinned memory at the GPU's end (`staging`)
    GPU, GPU, and each is its rank's alone              NCCL (`nccl`), once both ends have agreed on it (`handshake`)
    GPU, GPU that ranks share                           gloo, through pinned memory at both ends

What shared memory gains over the loopback interface is measured in benchmarks/transport; ASSIGNER_SHARED_MEMORY=0 in
the environment of a rank keeps it out of that.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.formats.terms import MOST_MICRO_BATCHES
from assigner.location import rank_of
from assigner.runtime.messages import nccl
from assigner.runtime.messages.carriers import GlooCarrier, MessageUnderWay, open_carrier
from assigner.runtime.messages.handshake import DirectMessages
from assigner.runtime.messages.hostmemory import host_memory, is_elsewhere, unannounced
from assigner.runtime.messages.sending import LostConnectionError, PendingSends, checked
from assigner.runtime.messages.staging import Staging
from assigner.runtime.recording.clock import ClockComparison, answer_clock, compare_clock
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.formats.terms import Backend
    from assigner.runtime.messages.carriers import Carrier
    from assigner.runtime.messages.hostmemory import HostMemory
    from assigner.runtime.messages.nccl import DirectChannels
    from assigner.runtime.messages.ordering import Message
    from assigner.runtime.recording.recorder import RecordedSpan
    from assigner.schedule.program import Program, Route

_MISSING = -5  # 0xFFFB as int16
_MISSING_BYTES = _MISSING.to_bytes(2, sys.byteorder, signed=True)
_ROUTE_TAGS = MOST_MICRO_BATCHES + 1  # a message of no micro-batch has the number -1
_LARGEST_PART = 1 << 26  # bytes; MPI counts them in 31 bits, and each part may take the whole time-out


def missing_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The message in place of the gradient of `tensor`, which has none; of its shape, type and device.

    The receiver waits for one, and zeros would be another thing: AdamW moves a parameter whose gradient is zero by its
    weight decay, and leaves one without a gradient alone. So an absent gradient travels as a bit pattern that no
    computation makes: every 16 bits are 0xFFFB, in each floating-point type a NaN whose payload no processor and no GPU
    writes.
    """
    lanes = tensor.numel() * tensor.element_size() // 2
    return torch.full((lanes,), _MISSING, dtype=torch.int16, device=tensor.device).view(tensor.dtype).view(tensor.shape)


def is_missing(message: torch.Tensor) -> bool:
    """Whether a message on the CPU says that there is no gradient; one without elements never does."""
    if not message.numel():
        return False
    size = message.element_size()  # its memory is looked at: a comparison by torch takes longer than a small message
    return ctypes.string_at(message.data_ptr(), size) == _MISSING_BYTES * (size // len(_MISSING_BYTES))


@dataclass(slots=True)
class _Posted:
    """A message that was posted: its memory, or its announcement's and what that is to be."""

    buffer: torch.Tensor
    work: MessageUnderWay
    announced: tuple[tuple[int, ...], torch.dtype] | None = None


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A contiguous tensor's memory in parts that a message may have; of one without elements there are none."""
    if tensor.nbytes <= _LARGEST_PART:
        return [tensor] if tensor.numel() else []
    flat = tensor.reshape(-1).view(torch.uint8)
    return [flat[at : at + _LARGEST_PART] for at in range(0, len(flat), _LARGEST_PART)]


class Transport:
    """Sends and receives of one rank; LostConnectionError where another one is gone, or does not answer in time."""

    def __init__(
        self,
        *,
        device: torch.device,
        timeout_s: float,
        direct: DirectChannels | None = None,
        memory: HostMemory | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self._numbers: dict[Route, int] = {}
        self._between: Counter[frozenset[int]] = Counter()
        self.carrier, self.direct = GlooCarrier() if carrier is None else carrier, direct
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self._memory = memory
        self._staging = Staging(device) if device.type == "cuda" else None
        self._posted: dict[Message, _Posted] = {}
        self._sends = PendingSends(self.timeout, self._wait, self._staging.attend if self._staging else None)
        self._direct_messages = None if direct is None else DirectMessages(direct, self._sends, self._wait, self._tag)

    @classmethod
    def opened(
        cls, workers: Sequence[str], device: torch.device, *, timeout_s: float, backend: Backend | None
    ) -> Transport:
        """That of this rank in its run, by every way there is. Every rank calls this at the same time.

        Raises:
            UsageError, WorkerError: what was asked for is not there, or ranks ask for unlike things.
            LostConnectionError: a rank is gone.
        """
        carrier = open_carrier(backend, timeout_s=timeout_s)
        ranks = nccl.direct_ranks(workers, device, backend)
        direct = nccl.DirectChannels(ranks, device=device, timeout=timedelta(seconds=timeout_s)) if ranks else None
        memory = host_memory(device) if carrier.name == "gloo" else None
        return cls(device=device, timeout_s=timeout_s, direct=direct, memory=memory, carrier=carrier)

    def know(self, routes: Iterable[Route]) -> None:
        """Number the routes of a program that have no number yet; every rank knows the same programs in one order.

        Raises:
            UsageError: what carries messages has too few tags.
        """
        routes = tuple(routes)
        for route in routes:
            ends = frozenset((rank_of(route.source), rank_of(route.target)))
            if route not in self._numbers:
                self._numbers[route] = self._between[ends]
                self._between[ends] += 1
            if 1 + (self._numbers[route] + 1) * _ROUTE_TAGS > self.carrier.most_tag:
                raise UsageError(
                    f"{route.source} and {route.target} exchange {self._between[ends]} values or more, and"
                    f" {self.carrier.name} has tags for {self.carrier.most_tag // _ROUTE_TAGS} only",
                    hint="backend='gloo' has more",
                )
        if self.direct is not None:
            checked("another worker", functools.partial(self.direct.open, routes))

    def begin(self, program: Program) -> None:
        """The messages of a program come next; its routes are known."""
        if self.direct is not None:
            self.direct.begin(program)

    def due(self, message: Message) -> Sequence[Message]:
        """What to post, in this order, so that `message` is posted: those before it, too, where there are no tags."""
        if (direct := self._direct_of(message)) is not None:
            return direct.channels.due(message)
        return () if message in self._posted else (message,)

    def _direct_of(self, message: Message) -> DirectMessages | None:
        """None: the message passes through the host."""
        return self._direct_messages if self.direct is not None and self.direct.carries(message.route) else None

    def _staging_of(self, message: Message) -> Staging | None:
        """None: the message's tensor is on the CPU at this end; so are shapes everywhere."""
        return None if message.route.payload is Payload.SHAPE else self._staging

    def _tag(self, message: Message) -> int:
        return 1 + self._numbers[message.route] * _ROUTE_TAGS + message.micro_batch + 1

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Get ready to receive a message that is due."""
        name = message.route.source
        if self._direct_messages is not None:
            self._direct_messages.take_ready()
        if (direct := self._direct_of(message)) is not None:
            direct.post(message, shape, dtype)
            return
        if self._memory is not None:
            self._post_announced()
            size = math.prod(shape) * dtype.itemsize
            if self._memory.carries(rank_of(name), size, sent=False):
                self._posted[message] = self._irecv(message, unannounced(), (shape, dtype))
                return
        staging = self._staging_of(message)
        buffer = torch.empty(shape, dtype=dtype, device="cpu") if staging is None else staging.buffer(shape, dtype)
        self._posted[message] = self._irecv(message, buffer)

    def _irecv(
        self, message: Message, buffer: torch.Tensor, announced: tuple[tuple[int, ...], torch.dtype] | None = None
    ) -> _Posted:
        name = message.route.source
        work = checked(name, lambda: self.carrier.irecv(buffer, rank_of(name), self._tag(message)))
        return _Posted(buffer, work, announced)

    def _post_announced(self) -> None:
        """Get ready for those messages of which it has been announced by now that they come through gloo."""
        for message, posted in self._posted.items():
            if posted.announced is not None and is_elsewhere(posted.buffer):
                self._wait_for(message, posted)
                self._posted[message] = self._follow(message, *posted.announced)

    def _follow(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> _Posted:
        return self._irecv(message, torch.empty(shape, dtype=dtype, device="cpu"))

    def _wait_for(self, message: Message, posted: _Posted) -> None:
        checked(message.route.source, lambda: self._wait(posted.work))

    def receive(self, message: Message, span: RecordedSpan | None = None) -> torch.Tensor:
        """The tensor of a message that was posted, once it is there; `span` gets the time at which it was."""
        buffer = self._arrived(message, span)
        assert buffer is not None
        return self._on_device(message, buffer)

    def receive_gradient(self, message: Message, span: RecordedSpan | None = None) -> torch.Tensor | None:
        """As `receive`, of a gradient; None: its sender has said that there is none. Nothing waits for a GPU."""
        buffer = self._arrived(message, span)
        if buffer is None or (self._direct_of(message) is None and is_missing(buffer)):
            return None
        return self._on_device(message, buffer)

    def _arrived(self, message: Message, span: RecordedSpan | None) -> torch.Tensor | None:
        """What a message has brought to where it arrives; None: that there is no gradient."""
        if (direct := self._direct_of(message)) is not None:
            return direct.receive(message, span)
        posted = self._posted.pop(message)
        self._wait_for(message, posted)
        buffer = posted.buffer if posted.announced is None else self._take_announced(message, posted)
        if span is not None:
            span.done(buffer.nbytes)
        return buffer

    def _on_device(self, message: Message, buffer: torch.Tensor) -> torch.Tensor:
        staging = self._staging_of(message)
        return buffer if staging is None or self._direct_of(message) is not None else staging.to_device(buffer)

    def _take_announced(self, message: Message, posted: _Posted) -> torch.Tensor:
        assert self._memory is not None
        assert posted.announced is not None
        if is_elsewhere(posted.buffer):
            follows = self._follow(message, *posted.announced)
            self._wait_for(message, follows)
            return follows.buffer
        try:
            return self._memory.take(rank_of(message.route.source), posted.buffer, *posted.announced)
        except ProcessLookupError as error:
            raise LostConnectionError(message.route.source, error) from error

    def send(self, message: Message, tensor: torch.Tensor, span: RecordedSpan | None = None) -> None:
        """Send a tensor; returns at once. `span` gets the times at which it was handed over and had left."""
        self._sends.check()
        name = message.route.target
        data = tensor.detach().resolve_conj().resolve_neg().contiguous()  # memory that says what the tensor is
        if span is not None:
            span.handed_over(data)
        if (direct := self._direct_of(message)) is not None:
            direct.send(message, data.to(self.device), span)
        elif (staging := self._staging_of(message)) is not None:
            buffer, copied = staging.to_host(data)
            start = functools.partial(self.carrier.isend, buffer, rank_of(name), self._tag(message))
            self._sends.add_copied(name, buffer, copied, start, span)
        else:
            self._send_on_host(message, data, span)

    def send_missing(self, message: Message, like: torch.Tensor, span: RecordedSpan | None = None) -> None:
        """Say that there is no gradient of `like`; else as `send`."""
        if (direct := self._direct_of(message)) is None:
            self.send(message, missing_gradient(like), span)
        else:
            self._sends.check()
            direct.decline(message, span)

    def _send_on_host(self, message: Message, data: torch.Tensor, span: RecordedSpan | None) -> None:
        name, target, tag = message.route.target, rank_of(message.route.target), self._tag(message)
        if self._memory is not None and self._memory.carries(target, data.nbytes, sent=True):
            announcement = self._memory.put(target, data)
            follows = is_elsewhere(announcement)
            self._start_send(name, announcement, target, tag, None if follows else span)
            if not follows:
                return
        self._start_send(name, data, target, tag, span)

    def _start_send(
        self, name: str, buffer: torch.Tensor, target: int, tag: int, span: RecordedSpan | None = None
    ) -> None:
        work = checked(name, lambda: self.carrier.isend(buffer, target, tag))
        self._sends.add(name, buffer, work, span)

    def _wait(self, work: MessageUnderWay) -> None:
        work.wait(self.timeout)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._sends.flush()

    def put(self, data: bytes, target: int) -> None:
        """Send bytes to a rank, outside of the program; returns at once. `data` is not empty."""
        self.put_tensor(torch.tensor(len(data), device="cpu"), target)
        self.put_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), target)

    def get(self, source: int) -> bytes:
        """The bytes that a rank puts next."""
        size = int(self.get_tensor(source, (), torch.int64))
        return self.get_tensor(source, (size,), torch.uint8).numpy().tobytes()

    def put_tensor(self, tensor: torch.Tensor, target: int) -> None:
        """Send a contiguous CPU tensor's values to a rank, outside of the program; returns at once."""
        for part in _parts(tensor):
            self._start_send(f"worker:{target}", part, target, tag=0)

    def get_tensor(self, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that a rank puts next, on the CPU."""
        name, made = f"worker:{source}", torch.empty(shape, dtype=dtype, device="cpu")
        for part in _parts(made):
            work = checked(name, functools.partial(self.carrier.irecv, part, source, 0))
            checked(name, functools.partial(self._wait, work))
        return made

    def compare_clocks(self) -> ClockComparison:
        """Rank 0's clock against this rank's; all ranks call this between two steps."""
        if dist.get_rank():
            return checked("worker:0", lambda: compare_clock(0))
        for rank in range(1, dist.get_world_size()):
            checked(f"worker:{rank}", functools.partial(answer_clock, rank))
        return ClockComparison(time.perf_counter())

    def close(self, *, failed: bool = False) -> None:
        """Stop the threads; what is still on its way is given up, at once where the run has failed."""
        if failed:
            self.carrier.close(failed=True)
        self._sends.close()
        self.carrier.close(failed=failed)
        if self.direct is not None:
            self.direct.close()
        if self._memory is not None:
            self._memory.close()
