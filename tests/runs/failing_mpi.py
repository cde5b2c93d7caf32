"""Two ranks of MPI, of which the second one fails in the eleventh step; what the first one says goes to FOLDER/said.

    mpirun -n 2 --enable-recovery python tests/runs/failing_mpi.py FOLDER raise|kill

The one that raises ends when that is written: mpirun ends the other ranks as soon as one has failed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from assigner import Pipeline, launched_rank
from assigner.errors import WorkerError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

WAIT_S = 200.0  # below what the test waits for mpirun
folder, how, rank = Path(sys.argv[1]), sys.argv[2], launched_rank()
torch.set_num_threads(1)
made = skips()
plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])


def fail() -> None:
    if how == "raise":
        raise ArithmeticError("the trap snapped")
    os.kill(os.getpid(), signal.SIGKILL)


try:
    with Pipeline(made, plan, graph=graph_of(made), backend="mpi", timeout_s=WAIT_S) as pipeline:
        for n in range(20):
            if rank == 1 and n == 10:
                fail()
            pipeline.step(made.make_batch(8, n))
except (WorkerError, ArithmeticError) as error:
    said, until = folder / "said", time.monotonic() + WAIT_S
    if rank == 0:
        (folder / "writing").write_text(f"{n} {type(error).__name__} {error}")
        (folder / "writing").rename(said)
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.05)
    sys.exit(4)
