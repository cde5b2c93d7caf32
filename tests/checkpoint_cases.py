"""What tests of checkpoints save and damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from workloads import graph_of, make_plan

from assigner import Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from assigner.model.workload import Workload


def trained(made: Workload, steps: int = 3, *, like: Workload | None = None) -> Pipeline:
    """A pipeline on one rank that has trained; `like`: a workload of the same model, whose graph is known."""
    known = like or made
    pipeline = Pipeline(made, make_plan(known), graph=graph_of(known))
    for n in range(steps):
        pipeline.step(made.make_batch(8, n))
    return pipeline


def weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in pipeline.state_dict().items()}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])
