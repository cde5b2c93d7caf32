"""One rank of run.py: trains, saves and closes, and writes down what it is doing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

RANK, FOLDER, VICTIM = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2])
RANKS = 3
WIDTH = 512
STEPS = 100
PAUSE_S = 0.01


def enter(phase: str) -> None:
    """Note the phase, whole or not at all."""
    aside = FOLDER / f".{RANK}"
    aside.write_text(f"{os.getpid()} {phase}")
    aside.rename(FOLDER / f"{RANK}")


enter("starting")

import torch  # noqa: E402 - it takes seconds, in which this process may be killed
from torch import nn  # noqa: E402

from assigner import Pipeline, Workload  # noqa: E402
from assigner.formats.plan import Plan  # noqa: E402
from assigner.formats.profile import WorkloadReference  # noqa: E402
from assigner.formats.stage import Stage  # noqa: E402
from assigner.model.marking import partition_graph  # noqa: E402


def model() -> nn.Module:
    """As many layers as ranks."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)))


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets."""
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def main() -> None:
    """All phases, one after the other."""
    torch.set_num_threads(1)
    workload = Workload(model, batch, nn.functional.mse_loss, torch.optim.Adam, 8)
    enter("capture")
    graph = partition_graph(workload)
    plan = Plan(
        workload=WorkloadReference(workload.name, batch_size=8, fingerprint=graph.fingerprint),
        micro_batches=4,
        micro_batch_size=2,
        stages=tuple(Stage(f"worker:{n}/cpu", (piece.name,)) for n, piece in enumerate(graph.pieces)),
    )
    enter("joining")
    with Pipeline(workload, plan, graph=graph) as pipeline:
        enter("first step")
        pipeline.step(workload.make_batch(8, 0))
        enter("training")
        for n in range(1, STEPS):
            pipeline.step(workload.make_batch(8, n))
            time.sleep(PAUSE_S)
        enter("saving")
        pipeline.save(FOLDER / "checkpoint")
        time.sleep((RANK - VICTIM) % RANKS * 0.5)  # the one that is to be killed comes first, and waits
        enter("closing")


main()
