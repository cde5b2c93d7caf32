"""The ported scripts of tests/scripts, on the ranks of a launch or alone.

    torchrun --nproc-per-node 2 tests/runs/ported.py FOLDER
    python tests/runs/ported.py FOLDER NAME...

Each is trained as a whole; on several ranks also stopped in the middle, by a signal to the last one, and resumed with
the workers in turned order. Writes FOLDER/RANK.jsonl: a line for each script, with the logs of its runs, and on rank 0
what its weights gave in plain PyTorch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner import Pipeline
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from scripts.port import NAMES, Log, captured, script

if TYPE_CHECKING:
    from assigner import Workload
    from assigner.model.marking import PartitionGraph


def spread(made: Workload, graph: PartitionGraph, ranks: list[int], micro_batches: int) -> Plan:
    """As many partitions on each rank, in their order."""
    names = [piece.name for piece in graph.pieces]
    bounds = [round(n * len(names) / len(ranks)) for n in range(len(ranks) + 1)]
    stages = [
        Stage(f"worker:{rank}/cpu", tuple(names[a:b]))
        for rank, (a, b) in zip(ranks, itertools.pairwise(bounds), strict=True)
    ]
    return Plan(
        workload=WorkloadReference(made.name, batch_size=made.batch_size, fingerprint=graph.fingerprint),
        micro_batches=micro_batches,
        micro_batch_size=-(-made.batch_size // micro_batches),
        stages=tuple(stages),
    )


def run(name: str, folder: Path, ranks: int, rank: int) -> dict[str, Any]:
    """The runs of a script."""
    module, (made, graph) = script(name), captured(name)
    micro_batches = module.MICRO_BATCHES if ranks > 1 else 1
    order = list(range(getattr(module, "WORKERS", ranks)))
    runs = [("whole", 0, order)]
    if ranks > 1:
        runs += [
            ("stopped", module.STOP_AT if rank == ranks - 1 else 0, order),
            ("resumed", 0, [ranks - 1 - each for each in order]),
        ]
    found: dict[str, Any] = {}
    for which, stop_at, where in runs:
        log, place = Log(stop_at), folder / ("whole" if which == "whole" else "parts")
        place.mkdir(parents=True, exist_ok=True)
        with Pipeline(made, spread(made, graph, where, micro_batches), graph=graph) as pipeline:
            module.ported(pipeline, place, log)
            state = pipeline.full_state_dict(to=0)
        found[which] = log.lines
        if rank == 0 and which != "stopped":
            model = made.model()
            model.load_state_dict(state, strict=True)
            found[f"{which}: used"] = module.used(model)
    return found


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    with (folder / f"{rank}.jsonl").open("w") as file:
        for name in names or NAMES:
            found = run(name, folder / name, ranks, rank)
            file.write(json.dumps({"name": name, **found}) + "\n")
            file.flush()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
