"""Random models under random plans on some ranks, each against the plain model.

    torchrun --nproc-per-node 3 tests/runs/combinations.py --seeds 0 75
    torchrun --nproc-per-node 3 tests/runs/combinations.py --seed 47
    python tests/runs/combinations.py --seed 47

Without torchrun all partitions are on one worker; a seed gives another plan for each number of ranks, and another one
with `--orders only`, which draws the order of every worker's steps too; with `--orders too` both. The last line of
rank 0 counts what was tried; what differs goes to stderr, with its seed, and the run ends with 1. A model that
cannot be cut is refused by all its seeds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from assigner import MarkingError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from drawn_combinations import MODELS_EVERY, captured, differences, drawn_combination
from drawn_models import drawn_model

ORDERS = {"none": (False,), "too": (False, True), "only": (True,)}


def failing(seed: int, workers: int, combination: object, found: list[str], *, orders: bool) -> str:
    """What a failure says."""
    start = f"torchrun --nproc-per-node {workers}" if dist.is_initialized() else "python"
    again = f"{start} tests/runs/combinations.py --seed {seed}{' --orders only' if orders else ''}"
    return "\n".join(
        [
            f"seed {seed} differs on rank {rank()}; again: {again}",
            *found[:8],
            str(combination),
            drawn_model(seed // MODELS_EVERY).text,
            "",
        ]
    )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main(seeds: range, *, both: tuple[bool, ...]) -> int:
    torch.set_num_threads(1)
    workers = 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        workers = dist.get_world_size()
    other: list[int] = []
    refused = 0
    for seed, orders in itertools.product(seeds, both):
        graph = captured(seed // MODELS_EVERY)
        if isinstance(graph, MarkingError):
            refused += 1
            if rank() == 0:
                sys.stderr.write(f"seed {seed} refused: {graph}\n")
            continue
        made = drawn_model(seed // MODELS_EVERY).workload
        combination = drawn_combination(made, graph, seed, workers=workers, orders=orders)
        try:
            found = list(differences(made, graph, combination))
        except BaseException:
            sys.stderr.write(failing(seed, workers, combination, [traceback.format_exc()], orders=orders))
            raise
        if found:
            other.append(seed)
            sys.stderr.write(failing(seed, workers, combination, found, orders=orders))
    me = rank()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    equal = len(seeds) * len(both) - refused - len(other)
    if me == 0 or other:
        sys.stdout.write(f"rank {me}: {equal} equal, {len(other)} not {other}, {refused} refused\n")
    return int(bool(other))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 75), metavar=("FIRST", "BEHIND"))
    parser.add_argument("--orders", choices=ORDERS, default="none", help="orders of actions are drawn too")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + 1) if given.seed is not None else range(*given.seeds)
    raise SystemExit(main(seeds, both=ORDERS[given.orders]))
