"""What messages cost the computing of the workers that send and receive them.

Each end computes, as in training, and now and then hands over or takes in a message, as the runtime does it: receives
are posted ahead, and threads carry the messages. On a CPU a message's cost is processor time: what the process has had
of all its threads, less what the computing had of its own. It goes missing where the computing uses all cores that the
worker has; a core beside them carries messages for nothing. That time is known to the microsecond for each message,
however slow the computing is just now, and whatever else the machine does: of some messages the median counts. (The
interrupts of a network card are not in it.) On a GPU, which no processor time tells of, it is the computing that went
missing, against the pieces that it computes alone.

Computing that has a share of a core alone, by a quota or beside other ranks, takes its processor time divided by that
share (sampling.py), and so does what it loses.

Messages are as far apart as actions are in training, and the pieces walk through more memory than a core's caches hold:
handling a message then finds threads asleep, and neither its code nor its data in the caches. (Two ranks on two cores,
a message of 1 or 384 KiB: every 2 ms 0.05 or 0.16 ms of the sender's processor time, every 12 ms 0.2 or 0.3.)
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Self

import torch

from assigner.machine.starvation import allowed_share, spare_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.profiler.lane import Lane

_ACTION_S = 1e-2  # of computing between two messages
_SPACING = 2.0  # messages start so many of their own times apart or more: one is there before the next but one
_STREAM_S = 0.2  # of messages of one size
_FEWEST, _MOST = 5, 20
_WARM_UP_S, _ALONE_S, _ALONE = 0.02, 1e-2, 9
_AHEAD = 3  # receives that are posted
_WIDTH = 96
_PIECES, _PIECE_BYTES = 128, 1 << 17  # of memory that is walked through; much less would stay in a core's caches


def send_busy(lane: Lane, target: int, messages: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """The source's side: messages of each size in bytes, of which one takes so many seconds.

    Returns:
        Of each size, seconds of computing that a message costs the source and the target.
    """
    lane.tell(target, len(messages))
    with ComputeLoad(lane.device) as work:
        work.alone()
        return [_send(lane, target, work, *each) for each in messages]


def _send(lane: Lane, target: int, work: ComputeLoad, size: int, seconds: float) -> tuple[float, float]:
    spacing = max(_SPACING * seconds, _ACTION_S)
    count = max(_FEWEST, min(_MOST, int(_STREAM_S / spacing)))
    for number in (size, spacing, count):
        lane.tell(target, number)
    buffer = lane.buffer(size)
    lane.ask(target)
    lost = work.lost_s(count, spacing, lambda: lane.send(target, buffer))
    lane.flush()
    return lost, lane.ask(target)


def answer_busy(lane: Lane, source: int) -> None:
    """The target's side of `send_busy`."""
    sizes = int(lane.ask(source))
    with ComputeLoad(lane.device) as work:
        work.alone()
        for _ in range(sizes):
            _take(lane, source, work)


def _take(lane: Lane, source: int, work: ComputeLoad) -> None:
    size, spacing, count = int(lane.ask(source)), lane.ask(source), int(lane.ask(source))
    left = count

    def take() -> None:
        nonlocal left
        lane.receive(source)
        left -= 1
        if left >= _AHEAD:
            lane.post(source, size)

    for _ in range(min(count, _AHEAD)):
        lane.post(source, size)
    lane.tell(source, 0.0)
    work.until(time.perf_counter() + 2 * spacing)  # what is taken in is there: nothing waits
    lane.tell(source, work.lost_s(count, spacing, take))


class ComputeLoad:
    """Small pieces of computing on a device; on a CPU they keep nothing else in its caches.

    While the context is open a CPU's pieces are computed by the calling thread alone, whose processor time is known.
    `spare` are cores that this host has beside those that its ranks compute with; None: as the system says.
    """

    def __init__(self, device: torch.device, *, spare: float | None = None) -> None:
        self.left = torch.ones(_WIDTH, _WIDTH, device=device)
        self.is_cuda = device.type == "cuda"
        pieces = 0 if self.is_cuda else _PIECES
        self._walk = itertools.cycle(torch.zeros(pieces, _PIECE_BYTES, dtype=torch.uint8, device=device).unbind())
        self._threads = torch.get_num_threads()
        spare = spare_cores(self._threads) if spare is None else spare
        self._displaced = min(1.0, max(0.0, 1.0 - spare))  # of what other threads take, so much is computing's
        self._share = 1.0 if self.is_cuda else allowed_share(self._threads)  # of a core, for a compute thread
        self._rate = 1.0  # of the clock, for a unit of computing
        self._computed = 0.0  # seconds of the calling thread's processor time; on a GPU pieces

    def __enter__(self) -> Self:
        if not self.is_cuda:
            torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)

    def run(self) -> None:
        """One piece."""
        begin = time.thread_time()
        self._piece()
        self._computed += 1 if self.is_cuda else time.thread_time() - begin

    def _piece(self) -> None:
        torch.mm(self.left, self.left)
        if self.is_cuda:  # messages and sums are on other streams, which computing does not wait for
            torch.cuda.current_stream(self.left.device).synchronize()
        else:
            next(self._walk).add_(1)

    def until(self, deadline: float) -> None:
        """Pieces until a time of `time.perf_counter`."""
        begin, runs = time.thread_time(), 0
        while time.perf_counter() < deadline:
            self._piece()
            runs += 1
        self._computed += runs if self.is_cuda else time.thread_time() - begin

    def alone(self) -> None:
        """Learn what computing takes by itself: for `lost_s`."""
        self.until(time.perf_counter() + _WARM_UP_S)
        periods = [self._period(_ALONE_S, lambda: None) for _ in range(_ALONE)]
        self._rate = statistics.median(spent / max(computed, 1e-9) for spent, computed in periods)

    def lost_s(self, count: int, spacing: float, act: Callable[[], object]) -> float:
        """Seconds of computing that one `act` costs, and what it leaves to other threads: the median of `count`.

        This thread calls it, and computes for `spacing` seconds behind each; what it computes by `run` is computing.
        """
        periods = [self._period(spacing, act) for _ in range(count)]
        return max(0.0, statistics.median(spent - self._rate * computed for spent, computed in periods)) / self._share

    def _period(self, spacing: float, act: Callable[[], object]) -> tuple[float, float]:
        """An act and computing behind it: the time that passed by this device's clock, and what was computed."""
        begin, computed = self._clock(), self._computed
        act()
        self.until(time.perf_counter() + spacing)
        return self._clock() - begin, self._computed - computed

    def _clock(self) -> float:
        """Of a CPU the processor time that computing has had, or could have."""
        if self.is_cuda:
            return time.perf_counter()
        own = time.thread_time()
        return own + self._displaced * (time.process_time() - own)
