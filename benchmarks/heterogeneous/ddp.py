"""The same workload under torch's DistributedDataParallel, as a user would write it: equal shares of every batch.

    assigner lab CLUSTER.toml -- torchrun benchmarks/heterogeneous/ddp.py examples/gpt.py:workload --json FILE

A batch whose rows do not go by the number of ranks is cut into shares that differ by one row, as a sampler deals them
out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from assigner import load_workload


def own_rows(values: Any, rank: int, ranks: int) -> Any:
    """A rank's rows of inputs or targets: tensors, or tuples, lists and dicts of them."""
    if isinstance(values, torch.Tensor):
        return values.tensor_split(ranks)[rank]
    if isinstance(values, dict):
        return {name: own_rows(value, rank, ranks) for name, value in values.items()}
    return type(values)(own_rows(value, rank, ranks) for value in values)


def main() -> None:
    """Train, and write the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload = load_workload(args.workload)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(workload.seed)
    model = DistributedDataParallel(workload.model())
    optimizer = workload.optimizer(model.parameters())
    seconds = []
    for step in range(args.steps):
        batch = workload.make_batch(workload.batch_size, seed=workload.seed + 1 + step)
        inputs, targets = (own_rows(part, rank, ranks) for part in batch)
        start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        dist.barrier()  # a step has ended when the last rank has ended it
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        args.json.write_text(json.dumps({"step_s": seconds}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
