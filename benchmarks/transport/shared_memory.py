"""Messages between two ranks of a host: gloo over the loopback interface, and shared memory with a note through gloo.

torchrun --nproc-per-node 2 benchmarks/transport/shared_memory.py

Shared memory: the sender copies into a segment that both have mapped, and sends 8 bytes; the receiver copies out.
Latency is half of a round trip of two ranks that do nothing else. A step has each rank compute and send, with the
receives of two steps posted ahead, as in training. The two ways alternate in blocks.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
BLOCKS = 12
SLOTS = 3  # two messages are on their way, and one is written
SEGMENT = "/dev/shm/assigner-benchmark-{}"  # noqa: S108 - POSIX shared memory


def mapped(owner: int, size: int) -> torch.Tensor:
    """The segment of a rank; it has no name any more when both have it."""
    mine = owner == dist.get_rank()
    if mine:
        file = os.open(SEGMENT.format(owner), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(file, size)
    dist.barrier()
    if not mine:
        file = os.open(SEGMENT.format(owner), os.O_RDWR)
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    os.close(file)
    dist.barrier()
    if mine:
        Path(SEGMENT.format(owner)).unlink()
    memory[:: mmap.PAGESIZE] = 0
    return memory


class Loopback:
    """gloo alone."""

    def __init__(self, size: int) -> None:
        self.size, self.peer = size, 1 - dist.get_rank()
        self.data = torch.ones(size, dtype=torch.uint8)

    def send(self, n: int) -> dist.Work:
        """Send message n."""
        return dist.isend(self.data, self.peer, tag=n)

    def post(self, n: int) -> tuple[torch.Tensor, dist.Work]:
        """Get ready for message n."""
        buffer = torch.empty(self.size, dtype=torch.uint8)
        return buffer, dist.irecv(buffer, self.peer, tag=n)

    def take(self, number: int, posted: tuple[torch.Tensor, dist.Work]) -> torch.Tensor:  # noqa: ARG002 - as below
        """Message `number`, once it is there."""
        posted[1].wait()
        return posted[0]


class Shared(Loopback):
    """Shared memory."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.note = torch.zeros(1, dtype=torch.int64)
        self.segments = [mapped(rank, SLOTS * size) for rank in range(2)]

    def slot(self, rank: int, n: int) -> torch.Tensor:
        """Where message n of a rank lies."""
        start = n % SLOTS * self.size
        return self.segments[rank][start : start + self.size]

    def send(self, n: int) -> dist.Work:
        """Copy in, tell."""
        self.slot(1 - self.peer, n).copy_(self.data)
        return dist.isend(self.note, self.peer, tag=n)

    def post(self, n: int) -> tuple[torch.Tensor, dist.Work]:
        """Wait for the note."""
        note = torch.empty(1, dtype=torch.int64)
        return note, dist.irecv(note, self.peer, tag=n)

    def take(self, number: int, posted: tuple[torch.Tensor, dist.Work]) -> torch.Tensor:
        """Copy out."""
        posted[1].wait()
        return self.slot(self.peer, number).clone()


def latencies(way: Loopback, count: int) -> list[float]:
    """Seconds of messages one way."""
    found = []
    for n in range(count):
        posted = way.post(n)
        dist.barrier()
        begin = time.perf_counter()
        if way.peer == 1:
            sent = way.send(n)
            way.take(n, posted)
        else:
            way.take(n, posted)
            sent = way.send(n)
        found.append((time.perf_counter() - begin) / 2)
        sent.wait()
    return found


def step_s(way: Loopback, matrix: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds of a step, and of the processor in it, with a message each way in every step."""
    repeats = max(4, 6 * way.size // MIB)
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    posted = {n: way.post(n) for n in range(2)}
    sent = []
    for n in range(count):
        for _ in range(repeats):
            torch.mm(matrix, matrix)
        sent.append(way.send(n))
        if n + 2 < count:
            posted[n + 2] = way.post(n + 2)
        way.take(n, posted.pop(n))
    for each in sent:
        each.wait()
    return (time.perf_counter() - begin) / count, (time.process_time() - used) / count


def main() -> None:
    """One line for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    matrix = torch.ones(256, 256)
    for size in SIZES:
        count = 24 if size <= MIB else 8
        ways = {"loopback": Loopback(size), "shared": Shared(size)}
        alone: dict[str, list[float]] = {name: [] for name in ways}
        steps: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for block in range(BLOCKS):
            for name in sorted(ways, reverse=block % 2 > 0):
                alone[name] += latencies(ways[name], count)
                steps[name].append(step_s(ways[name], matrix, count))
        if dist.get_rank() == 0:
            line = [f"{size // KIB:6d} KiB"]
            for name in ways:
                quartile = statistics.quantiles(alone[name], n=4)[0]
                wall, used = (statistics.median(each) for each in zip(*steps[name], strict=True))
                line.append(
                    f"{name}: alone {1e6 * statistics.median(alone[name]):.0f} us (quartile {1e6 * quartile:.0f}),"
                    f" step {1e3 * wall:.2f} ms, processor {1e3 * used:.2f} ms"
                )
            print(" | ".join(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
