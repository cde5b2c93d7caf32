"""The memory of a first step, each case in a process of its own: freed memory of another would hide what it takes.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/runs/held.py FOLDER

Writes FOLDER/kept.json and FOLDER/again.json: traces of one step, without rematerialisation and with it. With that
threshold the C library gives large blocks back when they are freed; it otherwise keeps some, and its heap grows by the
gaps between them (here by as much again as what a forward keeps, on glibc 2.36).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from assigner.runtime.recording import recorder

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import make_plan, numbers, pipeline_of, workload

WIDTH = 1 << 17
KEPT_BYTES = 16 * WIDTH * 8
"""What the forward of a micro-batch of 16 rows keeps, in float64."""


class Wide(nn.Module):
    """A layer with wide activations and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).mean(1, keepdim=True))


def traced(path: Path, *, remat: str) -> None:
    torch.set_num_threads(1)
    recorder.LOOK_EVERY_S = 0
    made = workload(Wide, "*", batch=numbers, rows=64)
    with pipeline_of(made, make_plan(made), remat=remat) as pipeline, pipeline.trace(path):
        pipeline.step(made.make_batch(64, 0))


def main(folder: Path) -> None:
    child = os.fork()
    if not child:
        traced(folder / "again.json", remat="always")
        os._exit(0)
    traced(folder / "kept.json", remat="never")
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
