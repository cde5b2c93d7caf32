"""Messages from GPU to GPU, and what their two ends tell each other before they launch one: no kernel waits for long.

A send or a receive of NCCL is a kernel that spins until its peer's runs. Meanwhile its device never comes to rest; and
whatever waits for that on its host (a kernel's first launch, memory that is freed to be allocated anew) waits as long,
also where CUDA loads all kernels at its start (benchmarks/gpu/RESULT.md, B). Two ranks that wait so for each other's
launches never end. So:

    sender      a thread of the channel: READY once the tensor is computed   waits for GO, launches, LAUNCHED
    receiver    the training's own thread, between two actions: memory, GO   waits for LAUNCHED, launches

Nothing is launched early: what is posted is the word that a message is ready. The receiver looks for that whenever it
posts or takes a message, so that one travels while it computes what comes before its use.

A kernel is launched first by the sender alone, while the receiver does nothing but wait for it: that one's launch waits
for no device. So each launched kernel's peer is launched, too, whatever any host waits for, and every device comes to
rest in the end. (What waits for a device gives up Python's lock, as torch's functions do.) A receiver holds up no rank
that it would not hold up with gloo, and a sender nobody: it has a thread for each target.

A sum over several workers is a kernel on each of them, which spins until all of theirs run. Its members meet first,
through the host, each with its part computed: none launches before all have come to this sum. Sums that share a member
are begun in one order by all; so of those that are launched in part, the first in that order waits for no device that
waits for another one.

    worker 0    computed   in │ launches            what is sent from here in threads goes on while it waits
    worker 1    B2 B3      computed   in │ launches

Source of the circle: pytorch/pytorch issue 136248.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from assigner.location import rank_of
from assigner.runtime.messages.sending import PendingSends, checked
from assigner.runtime.messages.staging import computed

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.runtime.messages.nccl import DirectChannels
    from assigner.runtime.messages.ordering import Message
    from assigner.runtime.recording.recorder import RecordedSpan

T = TypeVar("T")

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Meeting:
    """Where the members of a group meet before each kernel that all of them launch.

    Args:
        largest: Of all members' values, element by element; there once all have given theirs.
    """

    def __init__(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._largest, self._count = largest, 0

    def launch(self, launch: Callable[[], T]) -> T:
        """Launch this member's kernel once every member is about to.

        Raises:
            RuntimeError: another member is at another one.
        """
        self._count += 1
        most, least = self._largest(torch.tensor([self._count, -self._count], device="cpu")).tolist()
        if most != -least:
            raise RuntimeError(f"workers of a group are at unlike sums: at number {-least} and at number {most}")
        return launch()


class Signal(IntEnum):
    """What is told of a message."""

    UNTOLD = 0
    READY = 1
    NOTHING = 2
    GO = 3
    LAUNCHED = 4


class Handshake:
    """The signals of one message, at one of its ends.

    Args:
        peer: The other end's rank.
        tag: The message's own, under which nothing else passes through gloo.
    """

    def __init__(self, peer: int, tag: int, wait: Callable[[dist.Work], None]) -> None:
        self._peer, self._tag, self._wait = peer, tag, wait
        self._number: torch.Tensor
        self._work: dist.Work

    def _tell(self, signal: Signal) -> None:
        work = dist.isend(torch.tensor(int(signal), device="cpu"), self._peer, tag=self._tag)
        assert work is not None
        self._wait(work)

    def listen(self) -> None:
        """Get ready for the next signal of the other end."""
        self._number = torch.tensor(int(Signal.UNTOLD), device="cpu")
        work = dist.irecv(self._number, self._peer, tag=self._tag)
        assert work is not None
        self._work = work

    @property
    def is_told(self) -> bool:
        """Whether that signal has arrived by now."""
        return int(self._number) != Signal.UNTOLD

    def told(self) -> Signal:
        """It, once it is there; RuntimeError: the other end is gone, or late."""
        self._wait(self._work)
        return Signal(int(self._number))

    def offer(self, launch: Callable[[], T]) -> T:
        """The sender's side, of a tensor that is there: launch the send when its receiver waits for that."""
        self.listen()
        self._tell(Signal.READY)
        self.told()
        launched = launch()
        self._tell(Signal.LAUNCHED)
        return launched

    def decline(self) -> None:
        """The sender's side where there is nothing to send."""
        self._tell(Signal.NOTHING)

    def accept(self, launch: Callable[[], T]) -> T:
        """The receiver's side, once READY has been told and its memory is there: launch the receive."""
        self.listen()
        self._tell(Signal.GO)
        self.told()
        return launch()


class DirectMessages:
    """Those of one rank."""

    def __init__(
        self,
        channels: DirectChannels,
        sends: PendingSends,
        wait: Callable[[dist.Work], None],
        tag: Callable[[Message], int],
    ) -> None:
        self.channels = channels
        self._sends, self._wait, self._tag = sends, wait, tag
        # what it will be told of, in the order of each source
        self._awaited: dict[Message, tuple[Handshake, tuple[int, ...], torch.dtype]] = {}
        self._launched: dict[Message, tuple[torch.Tensor, dist.Work | None] | None] = {}  # None: nothing is sent

    def _handshake(self, message: Message, peer: str) -> Handshake:
        return Handshake(rank_of(peer), self._tag(message), self._wait)

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Get ready to be told that a message that is due can be launched."""
        handshake = self._handshake(message, message.route.source)
        checked(message.route.source, handshake.listen)
        self._awaited[message] = handshake, shape, dtype

    def take_ready(self) -> None:
        """Launch the receives of what others have ready by now, those of each source in its order."""
        late: set[str] = set()
        for message in list(self._awaited):
            source = message.route.source
            if source not in late and self._awaited[message][0].is_told:
                self._launch(message)
            else:
                late.add(source)

    def _launch(self, message: Message) -> None:
        """Launch the receive of a message, once its sender has it ready; those before it are launched."""
        (handshake, shape, dtype), source = self._awaited.pop(message), message.route.source
        if checked(source, handshake.told) is Signal.NOTHING:
            self._launched[message] = None
            return
        buffer = self.channels.buffer(shape, dtype)
        launch = functools.partial(self.channels.start, message, buffer)
        self._launched[message] = buffer, checked(source, lambda: handshake.accept(launch))

    def receive(self, message: Message, span: RecordedSpan | None) -> torch.Tensor | None:
        """A message that was posted, for which what is computed next waits; None: its sender has nothing to send."""
        source = message.route.source
        if message in self._awaited:
            for earlier in [each for each in self._awaited if each.route.source == source]:
                self._launch(earlier)
                if earlier == message:
                    break
        buffer, work = self._launched.pop(message) or (None, None)
        if buffer is not None:
            with nullcontext() if span is None else span.on_device(buffer):
                checked(source, lambda: self.channels.arrived(work, buffer))
        if span is not None:
            span.done(0 if buffer is None else buffer.nbytes)
        self.take_ready()
        return buffer

    def send(self, message: Message, data: torch.Tensor, span: RecordedSpan | None) -> None:
        """Send a contiguous tensor of this rank's device; returns at once."""
        target = message.route.target
        launch = functools.partial(self.channels.start, message, data)
        start = functools.partial(self._handshake(message, target).offer, launch)
        there = computed(data.device) if data.is_cuda else None
        self._sends.add_copied(target, data, there, start, span, lane=target)

    def decline(self, message: Message, span: RecordedSpan | None) -> None:
        """Say that there is nothing to send; returns at once."""
        target = message.route.target
        decline = self._handshake(message, target).decline
        self._sends.add_copied(target, _NO_BYTES, None, decline, span, lane=target)
