"""Links between workers: one-way times over message sizes, and what a transfer costs the ends' computing.

Pairs are measured in tournament rounds, so that each worker is in one pair at a time. The receiver notes when a
message has arrived, and the two ends' clocks are compared by the fastest of many small round trips.

Round-robin rounds: the circle method (T. P. Kirkman, 1847). Clock offset: F. Cristian, Probabilistic clock
synchronization, Distributed Computing 3, 1989.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.profiler.sampling import Sample, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SMALLEST = 1024
_GROWTH = 4
_LONGEST_S = 2.0  # sizes stop growing where one message takes longer
_BUDGET_S = 0.4  # per size and direction, past the fewest samples
_FEWEST, _MOST = 3, 30
_STREAM_S = 0.4
_CLOCK_ROUNDS = 100
_SHORTEST_S = 1e-6  # below what clocks can tell apart
_TAG_DATA, _TAG_BACK, _TAG_MORE = 1, 2, 3


@dataclass(frozen=True)
class SweepPoint:
    """The one-way time of one message size."""

    size: int
    sample: Sample


@dataclass(frozen=True)
class LinkSweep:
    """What was measured of one directed link."""

    source: int
    target: int
    points: tuple[SweepPoint, ...]
    sender_busy: float
    receiver_busy: float


def tournament(workers: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which every two of `workers` meet once, and nobody is in two pairs of a round."""
    seats: list[int | None] = [*range(workers)] + ([None] if workers % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        rounds.append(sorted(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def message_sizes(largest: int) -> list[int]:
    """1 KiB, 4 KiB, ... up to the first size that is not below `largest`."""
    sizes = [SMALLEST]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


def measure_links(
    rank: int, workers: int, largest: int, progress: Callable[[int, int], None] | None = None
) -> list[LinkSweep]:
    """Measure every directed link that starts at this rank. Every rank calls this at the same time.

    Args:
        rank: This rank.
        workers: How many ranks there are.
        largest: The largest message of interest, in bytes.
        progress: Called with (rounds done, rounds) .

    Returns:
        The links whose source is this rank.
    """
    found: list[LinkSweep] = []
    rounds = tournament(workers)
    for n, pairs in enumerate(rounds):
        dist.barrier()
        for low, high in pairs:
            if rank in (low, high):
                for source, target in ((low, high), (high, low)):
                    sweep = _measure_pair(rank, source, target, message_sizes(largest))
                    if sweep is not None:
                        found.append(sweep)
        if progress is not None:
            progress(n + 1, len(rounds))
    dist.barrier()
    return found


def _measure_pair(rank: int, source: int, target: int, sizes: Sequence[int]) -> LinkSweep | None:
    """One directed link; the source gets the result, the target plays along."""
    if rank == source:
        offset = _clock_offset(target)
        points = _sweep(target, sizes, offset)
        size, seconds = points[-1].size, points[-1].sample.median
        count = max(_FEWEST, min(_MOST * 10, int(_STREAM_S / seconds)))
        dist.send(torch.tensor([size, count], dtype=torch.int64), target, tag=_TAG_MORE)
        sender_busy = _busy_share(size, count, lambda buffer: dist.isend(buffer, target, tag=_TAG_DATA))
        receiver_busy = torch.zeros(1, dtype=torch.float64)
        dist.recv(receiver_busy, target, tag=_TAG_BACK)
        return LinkSweep(source, target, tuple(points), sender_busy, float(receiver_busy))
    _answer_clock(source)
    _answer_sweep(source)
    stream = torch.zeros(2, dtype=torch.int64)
    dist.recv(stream, source, tag=_TAG_MORE)
    size, count = (int(each) for each in stream)
    busy = _busy_share(size, count, lambda buffer: dist.irecv(buffer, source, tag=_TAG_DATA))
    dist.send(torch.tensor([busy], dtype=torch.float64), source, tag=_TAG_BACK)
    return None


def _clock_offset(peer: int) -> float:
    """How far the peer's clock is ahead of this one, in seconds.

    Of a round trip sent at a and back at b, the peer's answer was given at about (a + b) / 2; the fastest says best.
    """
    answer = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_CLOCK_ROUNDS):
        begin = time.perf_counter()
        dist.send(answer, peer, tag=_TAG_MORE)
        dist.recv(answer, peer, tag=_TAG_BACK)
        end = time.perf_counter()
        found.append((end - begin, float(answer) - (begin + end) / 2))
    return min(found)[1]


def _answer_clock(peer: int) -> None:
    """The peer's side of `_clock_offset`."""
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(_CLOCK_ROUNDS):
        dist.recv(question, peer, tag=_TAG_MORE)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), peer, tag=_TAG_BACK)


def _sweep(target: int, sizes: Sequence[int], offset: float) -> list[SweepPoint]:
    """Source's side: announce each message's size (0 ends the sweep), send it, learn when it arrived."""
    answer = torch.zeros(1, dtype=torch.float64)
    points: list[SweepPoint] = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < _FEWEST or (time.perf_counter() - begun < _BUDGET_S and len(times) < _MOST):
            dist.send(torch.tensor([size], dtype=torch.int64), target, tag=_TAG_MORE)
            dist.recv(answer, target, tag=_TAG_BACK)  # the receiver has its buffer ready
            begin = time.perf_counter()
            dist.send(buffer, target, tag=_TAG_DATA)
            dist.recv(answer, target, tag=_TAG_BACK)
            times.append(max(_SHORTEST_S, float(answer) - offset - begin))
        points.append(SweepPoint(size, summarise(times)))
        if points[-1].sample.median > _LONGEST_S:
            break
    dist.send(torch.tensor([0], dtype=torch.int64), target, tag=_TAG_MORE)
    return points


def _answer_sweep(source: int) -> None:
    """Target's side of a sweep: say when the buffer is ready, and when the message has arrived."""
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, source, tag=_TAG_MORE)
        if not int(size):
            return
        work = dist.irecv(torch.empty(int(size), dtype=torch.uint8), source, tag=_TAG_DATA)
        dist.send(torch.zeros(1, dtype=torch.float64), source, tag=_TAG_BACK)
        assert work is not None
        work.wait()
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), source, tag=_TAG_BACK)


def _busy_share(size: int, count: int, start: Callable[[torch.Tensor], dist.Work | None]) -> float:
    """How much slower this end computes while messages stream: 0 (not at all) to 1 (computing stops).

    Both ends run a compute loop first alone, then while a thread moves `count` messages of `size` bytes.
    """
    alone = _loop_rate(_until(time.perf_counter() + _STREAM_S / 2))
    buffer = torch.zeros(size, dtype=torch.uint8)

    def stream() -> None:
        for _ in range(count):
            work = start(buffer)
            assert work is not None
            work.wait()

    thread = threading.Thread(target=stream, name="assigner-stream")
    thread.start()
    beside = _loop_rate(lambda: not thread.is_alive())
    thread.join()
    return min(1.0, max(0.0, 1 - beside / alone))


def _until(deadline: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() > deadline


def _loop_rate(done: Callable[[], bool]) -> float:
    """Runs per second of a small piece of work until `done`."""
    left = torch.ones(128, 128)
    runs, begin = 0, time.perf_counter()
    while not runs or not done():
        torch.mm(left, left)
        runs += 1
    return runs / (time.perf_counter() - begin)
