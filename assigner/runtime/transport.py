"""Messages between workers: one tag for each route and micro-batch, receives posted ahead, sends freed when done.

gloo moves a message once both sides have posted it, in threads of its own. So a receive is posted two micro-batches
before it is needed, and runs while the worker computes; sends are waited for by a thread that drops their memory.
Messages are CPU tensors; what lies on another device is copied at both ends.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from assigner.location import Location
from assigner.runtime.clock import ClockComparison, answer_clock, compare_clock
from assigner.schedule import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.runtime.recorder import Span

T = TypeVar("T")

_MOST_MICRO_BATCHES = 1 << 15  # of a step; a tag has 31 bits


@dataclass(frozen=True)
class Message:
    """One message: a route and a micro-batch."""

    route: Route
    micro_batch: int


@functools.cache
def _rank(worker: str) -> int:
    return Location.parse(worker).rank


class LostConnectionError(Exception):
    """A message to or from `peer` broke off."""

    def __init__(self, peer: str, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.peer = peer


class Transport:
    """Sends and receives of one rank.

    Args:
        device: Where received tensors go.
        timeout_s: A wait for another rank that takes longer fails.
    """

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        self._numbers: dict[Route, int] = {}
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self._posted: dict[Message, tuple[torch.Tensor, dist.Work]] = {}
        self._sending: queue.SimpleQueue[tuple[str, torch.Tensor, dist.Work, Span | None] | None] = queue.SimpleQueue()
        self._unsent: deque[str] = deque()  # the targets of what has not left, oldest first
        self._idle = threading.Condition()
        self._broken: LostConnectionError | None = None
        self._thread = threading.Thread(target=self._finish_sends, name="assigner-sends", daemon=True)
        self._thread.start()

    def know(self, routes: Iterable[Route]) -> None:
        """Number the routes of a program that have no number yet; every rank knows the same programs in one order."""
        for route in routes:
            self._numbers.setdefault(route, len(self._numbers))

    def _tag(self, message: Message) -> int:
        return 1 + self._numbers[message.route] * _MOST_MICRO_BATCHES + message.micro_batch + 1

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Get ready to receive a message; a second call for the same one does nothing."""
        if message in self._posted:
            return
        buffer = torch.empty(shape, dtype=dtype)
        source = _rank(message.route.source)
        work = self._checked(message.route.source, lambda: dist.irecv(buffer, source, tag=self._tag(message)))
        assert work is not None
        self._posted[message] = buffer, work

    def receive(self, message: Message, span: Span | None = None) -> torch.Tensor:
        """The tensor of a message that was posted, once it is there; `span` gets the time at which it was.

        Raises:
            LostConnectionError: the sender is gone, or did not send within the time-out.
        """
        buffer, work = self._posted.pop(message)
        self._checked(message.route.source, lambda: work.wait(self.timeout))
        if span is not None:
            span.done(buffer.nbytes)
        return buffer.to(self.device)

    def send(self, message: Message, tensor: torch.Tensor, span: Span | None = None) -> None:
        """Send a tensor; returns at once. `span` gets the times at which it was handed over and had left.

        Raises:
            LostConnectionError: this or an earlier send found its receiver gone.
        """
        if self._broken is not None:
            raise self._broken
        buffer = tensor.detach().to("cpu").contiguous()
        if span is not None:
            span.handed_over(buffer.nbytes)
        self._start_send(message.route.target, buffer, _rank(message.route.target), self._tag(message), span)

    def _start_send(self, name: str, buffer: torch.Tensor, target: int, tag: int, span: Span | None = None) -> None:
        work = self._checked(name, lambda: dist.isend(buffer, target, tag=tag))
        assert work is not None
        with self._idle:
            self._unsent.append(name)
        self._sending.put((name, buffer, work, span))

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            LostConnectionError: a receiver is gone, or did not receive within the time-out.
        """
        with self._idle:
            left = self._idle.wait_for(
                lambda: not self._unsent or self._broken is not None, self.timeout.total_seconds()
            )
            late = None if left else self._unsent[0]
        if self._broken is not None:
            raise self._broken
        if late is not None:
            raise LostConnectionError(late, TimeoutError(f"it took no message for {self.timeout.total_seconds():g} s"))

    def share(self, value: torch.Tensor, root: int) -> torch.Tensor:
        """A small CPU tensor of rank `root` on every rank.

        Raises:
            LostConnectionError: a rank is gone.
        """
        if dist.get_rank() == root:
            for rank in range(dist.get_world_size()):
                if rank != root:
                    self._start_send(f"worker:{rank}", value, rank, tag=0)
            return value
        return self._take(value, root)

    def _take(self, buffer: torch.Tensor, source: int) -> torch.Tensor:
        """What rank `source` sends outside of the program."""
        name = f"worker:{source}"
        work = self._checked(name, lambda: dist.irecv(buffer, source, tag=0))
        assert work is not None
        self._checked(name, lambda: work.wait(self.timeout))
        return buffer

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on rank 0 and in the ranks' order; the others get none. `data` is not empty.

        Raises:
            LostConnectionError: a rank is gone.
        """
        if dist.get_rank():
            for part in (torch.tensor(len(data)), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
                self._start_send("worker:0", part, 0, tag=0)
            self.flush()
            return []
        found = [data]
        for rank in range(1, dist.get_world_size()):
            size = int(self._take(torch.tensor(0), rank))
            found.append(self._take(torch.empty(size, dtype=torch.uint8), rank).numpy().tobytes())
        return found

    def compare_clocks(self) -> ClockComparison:
        """Rank 0's clock against this rank's; all ranks call this between two steps.

        Raises:
            LostConnectionError: a rank is gone.
        """
        if dist.get_rank():
            return self._checked("worker:0", lambda: compare_clock(0))
        for rank in range(1, dist.get_world_size()):
            self._checked(f"worker:{rank}", functools.partial(answer_clock, rank))
        return ClockComparison(time.perf_counter())

    def meet(self) -> None:
        """Wait until every rank is here.

        Raises:
            LostConnectionError: a rank is gone, or did not come within the time-out.
        """
        self._checked("another worker", dist.barrier)

    def close(self) -> None:
        """Stop the thread; what is still on its way is given up."""
        self._sending.put(None)
        self._thread.join(1.0)

    def _finish_sends(self) -> None:
        while (item := self._sending.get()) is not None:
            target, buffer, work, span = item
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                self._broken = self._broken or LostConnectionError(target, error)
            if span is not None:
                span.done()
            del item, buffer, work, span  # the message's memory is free now
            with self._idle:
                self._unsent.popleft()
                self._idle.notify_all()

    @staticmethod
    def _checked(peer: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise LostConnectionError(peer, error) from error
