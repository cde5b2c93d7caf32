"""What messages cost the computing of the workers that send and receive them.

Each end computes in small pieces, first alone, then with messages passing at half of the link's rate or less, and alone
again. Messages are handed over and taken in between two pieces, as the runtime does it: receives are posted ahead, and
a send is waited for by a thread. A message's cost is the computing time that went missing.

Messages are no closer together than actions are in training, and the pieces walk through more memory than a core's
caches hold: handling a message then finds threads asleep, and neither its code nor its data in the caches. (Processor
time of two ranks on two cores for a message of 1 to 384 KiB: every 0.3 ms 0.05 to 0.16 ms at the sender and 0.1 at the
receiver, every 2 ms 0.14 to 0.28 and 0.23 to 0.35.)
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from typing import TYPE_CHECKING

import torch

from assigner.runtime.sending import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.profiler.lane import Lane

_ALONE_S = 0.1
_STREAM_S = 0.25  # of one block of messages
_MOST_BLOCKS, _FEWEST_BLOCKS, _BLOCKS_S = 3, 2, 1.0  # the median of the blocks counts
_FEWEST, _MOST = 2, 1000  # messages in a block
_SPACING, _LEAST_SPACING_S = 2.0, 2e-3  # messages start so many of their own times apart, and no less than an action
_LATE_S = 0.02  # a message is taken in so long, and two spacings, after it was due to leave: by then it is there
_WIDTH = 96
_PIECES, _PIECE_BYTES = 128, 1 << 17  # of memory that is walked through; much less would stay in a core's caches


def send_busy(lane: Lane, target: int, size: int, seconds: float) -> tuple[float, float]:
    """The source's side: stream messages of `size` bytes, each `seconds` long.

    Returns:
        Seconds of computing that a message costs the source and the target.
    """
    spacing = _spacing(seconds)
    count = max(_FEWEST, min(_MOST, int(_STREAM_S / spacing)))
    blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, int(_BLOCKS_S / (count * spacing))))
    for number in (size, seconds, count, blocks):
        lane.tell(target, number)
    buffer, work = lane.buffer(size), ComputeLoad(lane.device)

    def stream() -> tuple[int, float]:
        begin, runs = time.perf_counter(), 0
        for n in range(count):
            runs += work.until(begin + n * spacing)
            lane.send(target, buffer)
        lost: list[LostConnectionError] = []

        def leave() -> None:
            try:
                lane.flush()
            except LostConnectionError as error:
                lost.append(error)

        leaving = threading.Thread(target=leave, name="assigner-leaving")
        leaving.start()
        while leaving.is_alive():
            runs += work.run()
        if lost:
            raise lost[0]
        return runs, time.perf_counter() - begin

    lost = [lost_s(work, stream, lambda: lane.ask(target)) / count for _ in range(blocks)]
    return _middle(lost), lane.ask(target)


def _spacing(seconds: float) -> float:
    """How far apart messages of so many seconds start."""
    return max(_SPACING * seconds, _LEAST_SPACING_S)


def _middle(lost: Sequence[float]) -> float:
    """The median of some losses; below zero it is noise."""
    return max(0.0, statistics.median(lost))


def answer_busy(lane: Lane, source: int) -> None:
    """The target's side of `send_busy`."""
    size, seconds, count, blocks = int(lane.ask(source)), lane.ask(source), int(lane.ask(source)), int(lane.ask(source))
    work, spacing = ComputeLoad(lane.device), _spacing(seconds)
    late = _LATE_S + 2 * spacing
    ahead = min(count, 2 + int(late / spacing))

    def stream() -> tuple[int, float]:
        begin, runs = time.perf_counter(), 0
        for n in range(count):
            runs += work.until(begin + n * spacing + late)
            if n + ahead < count:
                lane.post(source, size)
            begin += _waited_s(lambda: lane.receive(source))
        return runs, time.perf_counter() - begin

    def ready() -> None:
        for _ in range(ahead):
            lane.post(source, size)
        lane.tell(source, 0.0)

    lost = [lost_s(work, stream, ready) / count for _ in range(blocks)]
    lane.tell(source, _middle(lost))


def _waited_s(take: Callable[[], object]) -> float:
    """Seconds of a call in which this thread did nothing: a late message costs its receiver time, but no computing."""
    begin, worked = time.perf_counter(), time.thread_time()
    take()
    return max(0.0, time.perf_counter() - begin - (time.thread_time() - worked))


def share_of(losses: Sequence[float], seconds: float) -> float:
    """The share of `seconds` that the median of some losses is, from 0 to 1."""
    return min(1.0, _middle(losses) / seconds)


def lost_s(work: ComputeLoad, stream: Callable[[], tuple[int, float]], meet: Callable[[], object]) -> float:
    """Computing seconds that went missing in `stream`, which gives (pieces computed, seconds)."""
    runs, spent = work.alone()
    meet()
    done, seconds = stream()
    again, more = work.alone()
    return seconds - done * (spent + more) / (runs + again)


class ComputeLoad:
    """Small pieces of computing on a device; on a CPU they keep nothing else in its caches."""

    def __init__(self, device: torch.device) -> None:
        self.left = torch.ones(_WIDTH, _WIDTH, device=device)
        self.is_cuda = device.type == "cuda"
        pieces = 0 if self.is_cuda else _PIECES
        self._walk = itertools.cycle(torch.zeros(pieces, _PIECE_BYTES, dtype=torch.uint8, device=device).unbind())

    def run(self) -> int:
        """One piece."""
        torch.mm(self.left, self.left)
        if self.is_cuda:  # messages and sums are on other streams, which computing does not wait for
            torch.cuda.current_stream(self.left.device).synchronize()
        else:
            next(self._walk).add_(1)
        return 1

    def until(self, deadline: float) -> int:
        """Pieces until a time of `time.perf_counter`; their number."""
        runs = 0
        while time.perf_counter() < deadline:
            runs += self.run()
        return runs

    def alone(self) -> tuple[int, float]:
        """Pieces for a while, and how long they took together."""
        begin = time.perf_counter()
        runs = self.run() + self.until(begin + _ALONE_S)
        return runs, time.perf_counter() - begin
