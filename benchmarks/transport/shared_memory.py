"""Messages between two CPU ranks of a host: the runtime's transport through gloo alone, and with shared memory.

torchrun --nproc-per-node 2 benchmarks/transport/shared_memory.py [KIB ...]

Latency is half of a round trip of two ranks that do nothing else. In a step each rank computes and sends a message,
with the receives of two steps posted ahead, as in training; all sizes go through memory here, also those below the
runtime's threshold. The two ways alternate in blocks, and a gain is the median over the blocks of one way's time over
the other's next to it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from assigner.runtime.messages import hostmemory
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.transport import Transport
from assigner.schedule.program import Payload, Route

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256, 1024, 4096, 16384)
BLOCKS = 16
AHEAD = 2
CPU = torch.device("cpu")


def route(source: int, target: int) -> Route:
    """The way from one rank to the other."""
    return Route(Payload.ACTIVATION, "", 0, f"worker:{source}/cpu", f"worker:{target}/cpu")


class Way:
    """One of the two ways that messages can take."""

    def __init__(self, memory: hostmemory.HostMemory | None) -> None:
        self.rank = dist.get_rank()
        self.transport = Transport(device=CPU, timeout_s=60.0, memory=memory)
        self.out, self.back = route(self.rank, 1 - self.rank), route(1 - self.rank, self.rank)
        self.transport.know([route(0, 1), route(1, 0)])

    def send(self, n: int, data: torch.Tensor) -> None:
        """Send message n."""
        self.transport.send(Message(self.out, n), data)

    def post(self, n: int, data: torch.Tensor) -> None:
        """Get ready for message n, which is like `data`."""
        self.transport.post(Message(self.back, n), tuple(data.shape), data.dtype)

    def take(self, n: int) -> torch.Tensor:
        """Message n, once it is there."""
        return self.transport.receive(Message(self.back, n))

    def latency_s(self, data: torch.Tensor, count: int) -> float:
        """Seconds of a message one way: the median."""
        found = []
        for n in range(count):
            self.post(n, data)
            dist.barrier()
            begin = time.perf_counter()
            if self.rank == 0:
                self.send(n, data)
                self.take(n)
            else:
                self.send(n, self.take(n))
            found.append((time.perf_counter() - begin) / 2)
            self.transport.flush()
        return statistics.median(found)

    def step_s(self, data: torch.Tensor, matrix: torch.Tensor, count: int) -> tuple[float, float]:
        """Seconds of a step, and of the processor in it, with a message each way in every step."""
        repeats = max(4, 6 * data.nbytes // MIB)
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        for n in range(AHEAD):
            self.post(n, data)
        for n in range(count):
            for _ in range(repeats):
                torch.mm(matrix, matrix)
            self.send(n, data.clone())
            if n + AHEAD < count:
                self.post(n + AHEAD, data)
            self.take(n)
        self.transport.flush()
        return (time.perf_counter() - begin) / count, (time.process_time() - used) / count


def main() -> None:
    """One line for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hostmemory.SHARED_FROM_BYTES = 1
    memory = hostmemory.host_memory(CPU)
    if memory is None:
        sys.exit("these ranks cannot share memory")
    ways = [Way(None), Way(memory)]
    matrix = torch.ones(256, 256)
    for kib in [int(each) for each in sys.argv[1:]] or SIZES:
        data = torch.ones(kib * KIB, dtype=torch.uint8)
        count = 24 if kib <= KIB else 8
        found: list[list[tuple[float, float, float]]] = [[], []]
        for block in range(1 + BLOCKS):
            for index in (0, 1) if block % 2 else (1, 0):
                way = ways[index]
                measured = way.latency_s(data, count), *way.step_s(data, matrix, count)
                if block:  # the first one fills page tables
                    found[index].append(measured)
        if dist.get_rank() == 0:
            parts = []
            for name, gloo, shared in zip(("alone", "step", "processor"), *(zip(*each) for each in found)):  # noqa: B905
                gain = statistics.quantiles([g / s for g, s in zip(gloo, shared, strict=True)], n=4)
                parts.append(
                    f"{name}: loopback {1e3 * statistics.median(gloo):.3f} ms, shared"
                    f" {1e3 * statistics.median(shared):.3f} ms, {gain[1]:.2f} times ({gain[0]:.2f} to {gain[2]:.2f})"
                )
            print(f"{kib:6d} KiB | load {os.getloadavg()[0]:.1f} | " + " | ".join(parts), flush=True)
    dist.barrier()
    for way in ways:
        way.transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
