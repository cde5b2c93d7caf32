"""One rank of a run: the runtime under several plans of one model, in turn.

    torchrun ... planned.py --rounds 20 --steps 2 --out FILE PLAN...

The plans' first one says which workload it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from chain import Chain
from contenders import Assigner
from turns import alternate, gathered

from assigner.formats.plan import load_plan


def main() -> None:
    """Alternate, and write the figures of all ranks by the plans' paths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("plans", nargs="+", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plans = {str(path): load_plan(path) for path in args.plans}
    first = next(iter(plans.values()))
    chain = Chain(first.workload.entry, first.micro_batches, dist.get_world_size())
    contenders = {path: Assigner(chain, plan, remat="plan") for path, plan in plans.items()}
    figures = gathered(alternate(contenders, rounds=args.rounds, steps=args.steps, title="predicted"))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(figures))
    dist.barrier()
    for contender in contenders.values():
        contender.pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
