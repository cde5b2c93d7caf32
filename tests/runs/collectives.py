"""On three ranks: all-reduces between two of them and among all.

    torchrun --nproc-per-node 3 tests/runs/collectives.py FOLDER [--leave]

With --leave the last rank goes before the second round, without a word.
Rank r writes FOLDER/r.json: what it has to report, the rounds that it was told of, and the error that ended it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.profiler.collectives import measure_collectives
from assigner.profiler.host import host_facts
from assigner.profiler.links import SweepOptions
from assigner.runtime.messages.sending import LostConnectionError

if TYPE_CHECKING:
    from assigner.formats.profile import Collective

TIMEOUT_S = 60.0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, cpu = dist.get_rank(), torch.device("cpu")
    found: list[Collective] = []
    told: list[tuple[int, int]] = []

    def progress(done: int, rounds: int) -> None:
        told.append((done, rounds))
        if sys.argv[2:] == ["--leave"] and done == 1 and rank == 2:
            (folder / f"{rank}.json").write_text("{}")
            os._exit(0)

    # as on hosts with other flags: the smallest size that anyone allows counts for all
    options = SweepOptions(largest=100_000 + 50_000 * rank, timeout_s=TIMEOUT_S, force_busy=rank == 1)
    error = ""
    try:
        measure_collectives(
            [host_facts(cpu)] * 3, [(0, 1), (0, 1, 2)], options, cpu, done=found.append, progress=progress
        )
    except (LostConnectionError, RuntimeError) as lost:
        error = str(lost)
    made = {"found": [asdict(each) for each in found], "told": told, "error": error}
    (folder / f"{rank}.json").write_text(json.dumps(made))
    if not error:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
