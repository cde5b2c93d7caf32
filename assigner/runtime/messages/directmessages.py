"""Messages from GPU to GPU on their channels: posted, offered, launched by both ends, and taken in.

Nothing is launched early: what is posted is the word that a message is ready (see `handshake`). The receiver looks for
that whenever it posts or takes a message, so that one travels while it computes what comes before its use.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.location import rank_of
from assigner.runtime.messages.handshake import Handshake, Signal, Told
from assigner.runtime.messages.sending import PendingSends, checked
from assigner.runtime.messages.staging import computed

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.runtime.messages.nccl import DirectChannels
    from assigner.runtime.messages.ordering import Message
    from assigner.runtime.recording.recorder import RecordedSpan

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class _Awaited:
    """A message of which this rank will be told when it can be launched, and what it is to be."""

    handshake: Handshake
    ready: Told
    shape: tuple[int, ...]
    dtype: torch.dtype


class DirectMessages:
    """Those of one rank.

    Args:
        channels: Where they pass.
        sends: Those of this rank.
        wait: Waits for a signal of another rank.
        tag: A message's own, through gloo.
    """

    def __init__(
        self,
        channels: DirectChannels,
        sends: PendingSends,
        wait: Callable[[dist.Work], None],
        tag: Callable[[Message], int],
    ) -> None:
        self.channels = channels
        self._sends, self._wait, self._tag = sends, wait, tag
        self._awaited: dict[Message, _Awaited] = {}  # those of one source in its order
        self._launched: dict[Message, tuple[torch.Tensor, dist.Work | None] | None] = {}  # None: nothing is sent

    def _handshake(self, message: Message, peer: str) -> Handshake:
        return Handshake(rank_of(peer), self._tag(message), self._wait)

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Get ready to be told that a message that is due can be launched."""
        source = message.route.source
        handshake = self._handshake(message, source)
        self._awaited[message] = _Awaited(handshake, checked(source, handshake.listen), shape, dtype)

    def take_ready(self) -> None:
        """Launch the receives of what others have ready by now, those of each source in its order."""
        late: set[str] = set()
        for message in list(self._awaited):
            source = message.route.source
            if source not in late and self._awaited[message].ready.is_there:
                self._launch(message)
            else:
                late.add(source)

    def _launch(self, message: Message) -> None:
        """Launch the receive of a message, once its sender has it ready; those before it are launched."""
        awaited, source = self._awaited.pop(message), message.route.source
        if checked(source, awaited.ready.taken) is Signal.NOTHING:
            self._launched[message] = None
            return
        buffer = self.channels.buffer(awaited.shape, awaited.dtype)
        launch = functools.partial(self.channels.start, message, buffer)
        self._launched[message] = buffer, checked(source, lambda: awaited.handshake.accept(launch))

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
