"""A rank for each of some devices: a plan on them against the plain model on the CPU.

torchrun --nproc-per-node 2 tests/runs/gpus.py FOLDER cuda:0,cuda:1 [apart]

apart: as in apart.py.
Writes FOLDER/RANK.json: how far the training lies from the plain model's, and the number of messages through NCCL.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils import _pytree as pytree

from assigner import Pipeline
from assigner.runtime.messages import nccl

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from apart import keep_apart
from workloads import Reference, language, make_plan, skips

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from assigner import Workload
    from assigner.formats.plan import Plan
    from assigner.runtime.messages.ordering import Message

messages = 0


class Counted(nccl.DirectChannels):
    """Channels that count."""

    def start(self, message: Message, tensor: torch.Tensor) -> dist.Work | None:
        global messages  # noqa: PLW0603 - one number of one process
        messages += 1
        return super().start(message, tensor)


def placed(plan: Plan, devices: list[str]) -> Plan:
    """The plan with rank n on device n."""
    ranks = [int(stage.worker.partition(":")[2].partition("/")[0]) for stage in plan.stages]
    stages = zip(plan.stages, ranks, strict=True)
    return replace(plan, stages=tuple(replace(each, sole_worker=f"worker:{n}/{devices[n]}") for each, n in stages))


def train(made: Workload, plan: Plan, device: str) -> float:
    """The largest difference over some steps; this rank is on a device."""
    reference, worst = Reference(made), 0.0
    with Pipeline(made, plan) as pipeline:
        for n, rows in enumerate((8, 7, 1, 8)):
            batch = made.make_batch(rows, n)
            given = pytree.tree_map(lambda each: each.to(device), batch) if n == 1 else batch  # as a script may do
            worst = max(worst, abs(pipeline.step(given) - reference.step(batch)))
            worst = max(worst, reference.gradient_distance({k: v.cpu() for k, v in pipeline.gradients().items()}))
            worst = max(worst, reference.distance((k, v.detach().cpu()) for k, v in pipeline.state_dict().items()))
    return worst


def main() -> None:
    if sys.argv[3:] == ["apart"]:
        keep_apart()
    nccl.DirectChannels = Counted
    devices, rank = sys.argv[2].split(","), int(os.environ["RANK"])
    tied, shared = language(), skips()
    cases = {
        "tied": (tied, [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])], "gpipe"),
        "skips": (shared, [(0, ["parts.0"]), (1, ["parts.1"]), (0, ["parts.2", "last"])], "gpipe"),
        "1f1b": (shared, [(1, ["parts.0", "parts.1"]), (0, ["parts.2", "last"])], "1f1b"),
    }
    worst = {
        name: train(made, placed(make_plan(made, stages, schedule=schedule), devices), devices[rank])
        for name, (made, stages, schedule) in cases.items()
    }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps({"worst": worst, "messages": messages}))


if __name__ == "__main__":
    main()
