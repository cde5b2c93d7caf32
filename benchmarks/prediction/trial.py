"""One rank: train under several plans in turn, each time in a process of its own, and leave a trace of each.

    torchrun ... trial.py --out DIR --rounds 2 --steps 10 ENTRY PLAN...

Every run is forked from a process that has loaded torch and cut the model: on a slow host that takes longer than the
steps. A run's memory is its own; nothing is shared between runs but that start.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import assigner
from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from assigner.model.marking import PartitionGraph

WARM_UP = 9  # steps; ranks compare what the script has changed in the first eight of them, and in one of 17 thereafter


def main() -> int:
    """Run all plans, `--rounds` times in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("entry")
    parser.add_argument("plans", nargs="+", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    workload = assigner.load_workload(args.entry)
    graph = partition_graph(workload)
    gc.collect()
    for turn in range(args.rounds):
        for path in args.plans:
            trace = args.out / f"{path.stem}-{turn}.trace.json"
            child = os.fork()
            if not child:
                os._exit(train(workload, graph, path, trace, args.steps))
            _, status = os.waitpid(child, 0)
            if status:
                print(f"{path}: ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
                return 1
    return 0


def train(workload: assigner.Workload, graph: PartitionGraph, plan: Path, trace: Path, steps: int) -> int:
    """One run on this rank. The warm-up is not traced: it sets up memory and connections, and ranks compare more."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(trace), store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    try:
        with assigner.Pipeline(workload, plan, graph=graph) as pipeline:
            batches = [workload.make_batch(workload.batch_size, seed=step) for step in range(steps)]
            for batch in batches[:WARM_UP]:
                pipeline.step(batch)
            with pipeline.trace(trace, last=steps, force=True):
                for batch in batches[WARM_UP:]:
                    pipeline.step(batch)
    except assigner.AssignerError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
