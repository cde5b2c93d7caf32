"""On three CPU ranks of this host: messages of every size through shared memory, and training on it.

    torchrun --nproc-per-node 3 tests/runs/neighbours.py FOLDER

Rank 2 shares memory in the second half only. Writes FOLDER/RANK.json: what arrived as it was sent, how many messages
were announced and how many of them lay in memory, what spans say, and how far training is from the plain model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner.runtime.messages import hostmemory
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.transport import Transport
from assigner.runtime.recording.recorder import RecordedSpan
from assigner.schedule.program import Payload, Route

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

import ranks  # beside this file

if TYPE_CHECKING:
    from collections.abc import Sequence

MICRO_BATCHES = 24
LEAST = 8192
CPU = torch.device("cpu")
counts = {"announced": 0, "in memory": 0}


class Counted(hostmemory.HostMemory):
    """Counts what it is asked to carry, and what it does."""

    def put(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        announcement = super().put(rank, tensor)
        counts["announced"] += 1
        counts["in memory"] += not hostmemory.is_elsewhere(announcement)
        return announcement


def route(source: int, target: int) -> Route:
    return Route(Payload.ACTIVATION, "", 0, f"worker:{source}/cpu", f"worker:{target}/cpu")


def sent(source: int, target: int, n: int) -> torch.Tensor:
    """Message n: below the least size, and above it, ragged; of two types."""
    generator = torch.Generator().manual_seed(1000 * source + 100 * target + n)
    rows = 1 + (97 * n) % 41
    made = torch.randn(rows, 160, generator=generator)
    return made.to(torch.bfloat16) if n % 3 == 0 else made.t() if n % 3 == 1 else made


def exchange(transport: Transport, ahead: int) -> dict[str, Any]:
    """Every rank sends to every other one all at once, and takes the messages, some of them late and in no order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [each for each in range(world) if each != rank]
    ways = [(source, target) for source in range(world) for target in range(world) if source != target]
    transport.know(route(*way) for way in ways)
    spans = [RecordedSpan(None, 0.0) for _ in range(2)]
    for n in range(MICRO_BATCHES):
        for other in others:
            transport.send(Message(route(rank, other), n), sent(rank, other, n), spans[0] if n == 4 else None)
    order = [(other, n) for n in [*range(1, MICRO_BATCHES, 2), *range(0, MICRO_BATCHES, 2)] for other in others]
    same = 0
    for place in range(len(order) + ahead):
        if place < len(order):
            other, n = order[place]
            like = sent(other, rank, n)
            transport.post(Message(route(other, rank), n), tuple(like.shape), like.dtype)
        if place >= ahead:
            other, n = order[place - ahead]
            got = transport.receive(Message(route(other, rank), n), spans[1] if n == 4 else None)
            same += torch.equal(got, sent(other, rank, n))
    transport.flush()
    return {
        "same": same, "messages": len(order), **counts,
        "ended": [span.end_s > span.start_s for span in spans],
        "moved": [span.moved_bytes == sent(0, 1, 4).nbytes for span in spans],
    }  # fmt: skip


def run(ahead: int) -> dict[str, Any]:
    counts.update({"announced": 0, "in memory": 0})
    memory = hostmemory.host_memory(CPU)
    transport = Transport(device=CPU, timeout_s=30.0, memory=memory)
    found = exchange(transport, ahead)
    dist.barrier()
    transport.close()
    return found


def trained(names: Sequence[str]) -> dict[str, Any]:
    hostmemory.SHARED_FROM_BYTES = 1
    counts.update({"announced": 0, "in memory": 0})
    return {name: ranks.written(name) for name in names} | {"in memory": counts["in memory"]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hostmemory.HostMemory = Counted
    hostmemory.SHARED_FROM_BYTES = LEAST
    if dist.get_rank() == 2:
        os.environ[hostmemory.SWITCH] = "0"
    found = {"two of three": run(2)}
    os.environ.pop(hostmemory.SWITCH, None)
    found["three"] = run(2)
    hostmemory._ARENA_BYTES = 1 << 16
    found["little room"] = run(3)
    found["training"] = trained(["1f1b, deeper", "skips over three workers"])
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
