"""On two ranks: two networks against each other, and optimizers with closures.

    torchrun --nproc-per-node 2 tests/runs/searching.py FOLDER

Writes FOLDER/RANK.json: case -> what this rank found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from assigner import Pipeline
from assigner.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

import two_networks
from workloads import Reference, graph_of, make_plan, skips

ACROSS = [(0, ["generator.0"]), (1, ["generator.1", "discriminator.0"]), (0, ["discriminator.1"])]
APART = [(1, ["generator.0", "generator.1"]), (0, ["discriminator.0", "discriminator.1"])]
NAMES = ("generator.0", "generator.1", "discriminator.0", "discriminator.1")


def adversaries(stages: Any, phase: str, micro_batches: int, **settings: Any) -> dict[str, float]:
    """The largest differences from the plain script; of buffers where there is one micro-batch."""
    made, given = two_networks.workload(phase), two_networks.batches(4)
    expected, state = two_networks.plain(given, micro_batches)
    plan = make_plan(made, stages, micro_batches=micro_batches, **settings)
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        losses = two_networks.trained(pipeline, given)
        mine = pipeline.state_dict()
    off = [abs(a - b) for one, other in zip(losses, expected, strict=True) for a, b in zip(one, other, strict=True)]
    kinds = {name: "buffers" if "running" in name or "tracked" in name else "weights" for name in mine}
    worst = {"losses": max(off), "weights": 0.0, "buffers": 0.0}
    for name, kind in kinds.items():
        if kind == "weights" or micro_batches == 1:
            worst[kind] = max(worst[kind], float((mine[name].detach() - state[name]).abs().max()))
    return worst


def searched(rank: int) -> dict[str, float]:
    """LBFGS on one worker of a run with two ranks: by `step`, and by a closure of the script's own."""
    made = replace(skips(), optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4))
    reference = Reference(made)
    names = [name for stage in make_plan(made).stages for name in stage.partitions]
    off = 0.0
    with Pipeline(made, make_plan(made, [(rank, names)], remat=names), graph=graph_of(made)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            if n == 1:

                def closure() -> float:
                    pipeline.optimizer.zero_grad()
                    return pipeline.step(batch, update=False)  # noqa: B023 - called at once

                loss = pipeline.optimizer.step(closure)
            else:
                loss = pipeline.step(batch)
            off = max(off, abs(loss - plain_search(reference, batch)))
        return {"loss": off, "weights": reference.distance(pipeline.named_parameters()), "updates": pipeline.steps}


def plain_search(reference: Reference, batch: Any) -> float:
    """A step of the reference's own optimizer over the whole batch."""

    def closure() -> torch.Tensor:
        reference.optimizer.zero_grad()
        loss = reference.loss(batch)
        loss.backward()
        return loss

    return float(reference.optimizer.step(closure).detach())


def refusals() -> dict[str, str]:
    """What is said of closures where both workers have parameters; the loss that a known optimizer's closure gives."""
    made = skips()
    names = [name for stage in make_plan(made).stages for name in stage.partitions]
    plan = make_plan(made, [(0, names[:1]), (1, names[1:])])
    said = {}
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        batch = made.make_batch(8, 0)

        def closure() -> float:
            pipeline.optimizer.zero_grad()
            return pipeline.step(batch, update=False)

        before = pipeline.evaluate(batch)
        said["given"] = str(abs(pipeline.optimizer.step(closure) - before) < 1e-9 and pipeline.steps == 1)
        said["moved"] = str(pipeline.evaluate(batch) < before)
    try:
        Pipeline(replace(made, optimizer=torch.optim.LBFGS), plan)
    except UsageError as error:
        said["refused"], said["hint"] = error.message, error.hint or ""
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        "across": adversaries(ACROSS, "generator", 1),
        "apart, remat": adversaries(APART, "generator", 1, remat=NAMES),
        "micro-batches": adversaries(ACROSS, "generator", 2, schedule="interleaved", remat=NAMES[1:3]),
        "a plan for the other phase": adversaries(APART, "discriminator", 2, schedule="1f1b"),
        "search on rank 0": searched(0),
        "search on rank 1": searched(1),
        "closures": refusals(),
    }
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
