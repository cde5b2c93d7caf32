"""Sends on their way: their memory is kept until they have left.

gloo tells nobody when a send has left; somebody has to wait for it. A thread does that for large ones, whose memory
should be free soon, and for those of which a trace wants the time. To wake it costs more than a small message is worth:
those are waited for at the end of a step, where the worker waits in any case, or by the thread once they are many.

A send from a GPU is started by a thread, once its tensor, or a copy of it, is there. What goes through the host has one
such thread, which waits for no other rank; what goes from GPU to GPU one for each target, which does.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from assigner.runtime.failures.questions import awaited
from assigner.runtime.messages.carriers import MessageUnderWay
from assigner.runtime.messages.staging import computed
from assigner.runtime.recording.recorder import RecordedSpan

if TYPE_CHECKING:
    from datetime import timedelta


T = TypeVar("T")

SMALL_BYTES = 1 << 16
_MOST_KEPT_BYTES = 1 << 20
_MOST_KEPT = 128


class LostConnectionError(Exception):
    """A message to or from `peer` broke off."""

    def __init__(self, peer: str, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.peer = peer


def checked(peer: str, call: Callable[[], T]) -> T:
    """What a call gives that talks to another rank.

    Raises:
        LostConnectionError: it broke off.
        RuntimeError: this rank's own device failed, in torch's words.
    """
    me = threading.get_ident()
    awaited[me] = peer  # it stays there where the call breaks off: others may ask then
    try:
        made = call()
    except RuntimeError as error:
        found = _broken(peer, error)
        if found is error:
            raise
        raise found from error
    awaited.pop(me, None)
    return made


def _broken(peer: str, error: RuntimeError) -> RuntimeError | LostConnectionError:
    """What an error in a call to another rank means: torch has no type for a broken connection, but for a device's."""
    is_own = isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError)
    return error if is_own else LostConnectionError(peer, error)


@dataclass(slots=True)
class _Send:
    """A send, and what starts it where something on the device has to be there first."""

    number: int
    target: str
    buffer: torch.Tensor
    span: RecordedSpan | None
    work: MessageUnderWay | None = None
    copied: torch.cuda.Event | None = None
    start: Callable[[], MessageUnderWay | None] | None = None


class PendingSends:
    """The sends of one rank.

    Args:
        attend: Called first in each thread; None: nothing to do there.
    """

    def __init__(
        self, timeout: timedelta, wait: Callable[[MessageUnderWay], None], attend: Callable[[], None] | None = None
    ) -> None:
        self.timeout, self._wait, self._attend = timeout, wait, attend
        self._numbers = itertools.count()
        self._kept: list[_Send] = []  # small ones
        self._kept_bytes = 0
        self._unsent: dict[int, str] = {}  # the targets of what the threads have and has not left, oldest first
        self._idle = threading.Condition()
        self._broken: RuntimeError | LostConnectionError | None = None
        self._starting: dict[str, queue.SimpleQueue[_Send | None]] = {}  # by lane
        self._sending: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begin_thread("assigner-sends", self._finish)

    def _begin_thread(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def check(self) -> None:
        """Raise LostConnectionError where a send is known to have found its receiver gone; or its device's error."""
        if self._broken is not None:
            raise self._broken

    def add(self, target: str, buffer: torch.Tensor, work: MessageUnderWay, span: RecordedSpan | None = None) -> None:
        """A send that has been started."""
        send = _Send(next(self._numbers), target, buffer, span, work)
        if span is not None or buffer.nbytes > SMALL_BYTES or buffer.is_cuda:
            self._hand_over(send, self._sending)
            return
        self._kept.append(send)
        self._kept_bytes += buffer.nbytes
        if self._kept_bytes > _MOST_KEPT_BYTES or len(self._kept) > _MOST_KEPT:
            for each in self._taken():
                self._hand_over(each, self._sending)

    def add_copied(
        self,
        target: str,
        buffer: torch.Tensor,
        copied: torch.cuda.Event | None,
        start: Callable[[], MessageUnderWay | None],
        span: RecordedSpan | None = None,
        *,
        lane: str = "",
    ) -> None:
        """A send that a thread starts once its buffer has been filled.

        Args:
            target: Its receiver.
            buffer: What is sent.
            copied: The event after which it is there; None: it is.
            start: Starts it; None: there was nothing to start.
            span: Gets the time at which it had left.
            lane: Those of one lane start in order; `start` may wait for another rank where it holds up its lane alone.
        """
        if lane not in self._starting:
            waiting = self._starting[lane] = queue.SimpleQueue()
            self._begin_thread(f"assigner-copies {lane}".rstrip(), functools.partial(self._start, waiting))
        send = _Send(next(self._numbers), target, buffer, span, copied=copied, start=start)
        self._hand_over(send, self._starting[lane])

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            LostConnectionError: a receiver is gone, or did not receive within the time-out.
        """
        for send in self._taken():
            assert send.work is not None
            checked(send.target, functools.partial(self._wait, send.work))
        with self._idle:
            seconds = self.timeout.total_seconds()
            if self._unsent:
                awaited[threading.get_ident()] = next(iter(self._unsent.values()))
            left = self._idle.wait_for(lambda: not self._unsent or self._broken is not None, seconds)
            late = None if left else next(iter(self._unsent.values()))
        self.check()
        if late is not None:
            raise LostConnectionError(late, TimeoutError(f"it took no message for {seconds:g} s"))
        awaited.pop(threading.get_ident(), None)

    def close(self) -> None:
        """Stop the threads; what is still on its way is given up."""
        for each in (*self._starting.values(), self._sending):
            each.put(None)
        given_up = bool(self._unsent)
        for thread in self._threads:
            thread.join(1.0 if given_up else 10.0)
        self._kept.clear()

    def _taken(self) -> list[_Send]:
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        return kept

    def _hand_over(self, send: _Send, to: queue.SimpleQueue[_Send | None]) -> None:
        with self._idle:
            self._unsent[send.number] = send.target
        to.put(send)

    def _start(self, waiting: queue.SimpleQueue[_Send | None]) -> None:
        """A lane's thread: it starts sends when their buffers are there."""
        if self._attend is not None:
            self._attend()
        while (send := waiting.get()) is not None:
            assert send.start is not None
            try:
                if send.copied is not None:
                    send.copied.synchronize()
                send.work = send.start()
            except RuntimeError as error:
                self._broken = self._broken or _broken(send.target, error)
            self._sending.put(send)
            del send

    def _finish(self) -> None:
        """The thread that waits until sends have left."""
        if self._attend is not None:
            self._attend()
        while (send := self._sending.get()) is not None:
            try:
                if send.work is not None:
                    self._wait(send.work)
                if send.buffer.is_cuda:
                    computed(send.buffer.device).synchronize()
            except RuntimeError as error:
                self._broken = self._broken or _broken(send.target, error)
            if send.span is not None:
                send.span.done()
            number = send.number
            del send  # the message's memory is free now
            with self._idle:
                del self._unsent[number]
                self._idle.notify_all()
