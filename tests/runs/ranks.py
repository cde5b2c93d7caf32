"""On three ranks, in one process group: plans of every shape against the plain model.

    torchrun --nproc-per-node 3 tests/runs/ranks.py FOLDER [CASE...]

Writes FOLDER/RANK.json: case -> what this rank found; and FOLDER/checkpoint, saved under one of the plans.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner import AssignerError, Pipeline, UsageError
from assigner.runtime.step.stepmessages import StepValues

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import Reference, diamond, graph_of, language, make_plan, random_plan, skips, towers

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload
    from assigner.formats.plan import Plan

DRAWN = 2
"""Random plans for each model; tests/runs/combinations.py draws many more, and the models too."""

TRAINED = [(2, ["tokens", "blocks.0"]), (0, ["blocks.1"]), (1, ["blocks.2", "head"])]
RESUMED = [(1, ["tokens"]), (2, ["blocks.0", "blocks.1", "blocks.2", "head"])]

PLANS = {
    "workers in another order, tied weights, remat": (language, TRAINED, {"remat": ["blocks.1", "head"]}),
    "a rank that idles": (language, RESUMED, {}),
    "skips over three workers": (skips, [(1, ["parts.0"]), (2, ["parts.1"]), (0, ["parts.2", "last"])], {}),
    "two stages of one worker": (
        skips, [(0, ["parts.0"]), (1, ["parts.1"]), (0, ["parts.2"]), (2, ["last"])], {"remat": ["parts.1"]},
    ),
    "a branch": (towers, [(2, ["left"]), (0, ["right"]), (1, ["join"])], {}),
    "stages that workers share": (
        language, [({0: 3, 2: 1}, ["tokens", "blocks.0"]), ({2: 2, 1: 2}, ["blocks.1", "blocks.2"]), (0, ["head"])],
        {"remat": ["blocks.1"]},
    ),
    "1f1b that workers share": (
        skips, [({0: 2, 2: 2}, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])], {"schedule": "1f1b"},
    ),
    "1f1b": (skips, [(0, ["parts.0"]), (1, ["parts.1", "parts.2"]), (2, ["last"])], {"schedule": "1f1b"}),
    "1f1b, deeper": (
        skips, [(2, ["parts.0"]), (1, ["parts.1", "parts.2"]), (0, ["last"])],
        {"schedule": "1f1b", "in_flight": 3, "micro_batches": 8, "remat": ["last"]},
    ),
}  # fmt: skip


def against_the_plain_model(made: Workload, plan: Plan) -> dict[str, float]:
    """The largest differences over steps of 8, 7, 1 and 8 rows."""
    reference = Reference(made)
    found = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        for n, rows in enumerate((8, 7, 1, 8)):
            batch = made.make_batch(rows, n)
            found["loss"] = max(found["loss"], abs(pipeline.step(batch) - reference.step(batch)))
            found["gradients"] = max(found["gradients"], reference.gradient_distance(pipeline.gradients()))
            found["weights"] = max(found["weights"], reference.distance(pipeline.state_dict().items()))
    return found


def written(name: str) -> dict[str, float]:
    """A plan of PLANS."""
    make, stages, options = PLANS[name]
    made = make()
    return against_the_plain_model(made, make_plan(made, stages, **options))


def drawn() -> dict[str, float]:
    """Random plans in which workers hold several stages: the largest differences of them all."""
    worst: dict[str, float] = {}
    for make in (language, skips, towers, diamond):
        made = make()
        for seed in range(DRAWN):
            for key, value in against_the_plain_model(made, random_plan(made, seed, workers=3)).items():
                worst[key] = max(worst.get(key, 0.0), value)
    return worst


def accumulation() -> dict[str, float]:
    """Steps without an update, then `optimizer.step()`, with weights that two workers share; and one behind an update.

    That one is by the same gradients but one of a single rank's.
    """
    made = language()
    reference = Reference(made)
    batches = [made.make_batch(rows, rows) for rows in (8, 3)]
    for batch in batches:
        reference.loss(batch).backward()
    reference.optimizer.step()
    with Pipeline(made, make_plan(made, TRAINED), graph=graph_of(made)) as pipeline:
        for batch in batches:
            pipeline.step(batch, update=False)
        pipeline.optimizer.step()
        for of, each in ((reference, reference.model), (pipeline, pipeline)):
            of.optimizer.zero_grad()
            of.step(batches[0])
            for name, parameter in each.named_parameters():
                if name.startswith("blocks.0."):
                    parameter.grad.mul_(2)
            of.optimizer.step()
        return {
            "gradients": reference.gradient_distance(pipeline.gradients()),
            "weights": reference.distance(pipeline.state_dict().items()),
        }


def dropout() -> dict[str, float]:
    """The loss under three workers less the loss under one, over three steps with dropout."""
    made = language(dropout=0.4)
    with (
        Pipeline(made, make_plan(made, TRAINED, remat=["blocks.0"]), graph=graph_of(made)) as many,
        Pipeline(made, make_plan(made), graph=graph_of(made)) as one,
    ):
        batches = [made.make_batch(8, n) for n in range(3)]
        return {"loss": max(abs(many.step(batch) - one.step(batch)) for batch in batches)}


def leaks() -> dict[str, int]:
    """How many threads and open files 30 steps leave behind."""
    gc.collect()  # what pipelines before have left: it would go at any time
    made = skips()
    with Pipeline(made, make_plan(made, PLANS["skips over three workers"][1]), graph=graph_of(made)) as pipeline:
        counts = []
        for n in range(40):
            pipeline.step(made.make_batch(8, n))
            counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
        assert pipeline._installed.executor.step == StepValues()
    return {"threads": counts[-1][0] - counts[9][0], "files": counts[-1][1] - counts[9][1]}


def checkpoints(folder: Path) -> dict[str, Any]:
    """Save under one plan, go on under it and under another one from the checkpoint."""
    made = language()
    with Pipeline(made, make_plan(made, TRAINED), graph=graph_of(made)) as pipeline:
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
        pipeline.save(folder)
        try:
            pipeline.save(folder)
        except UsageError as error:
            again = str(error)
        expected = [pipeline.step(made.make_batch(8, n)) for n in range(3, 6)]
    with Pipeline(made, make_plan(made, RESUMED), graph=graph_of(made)) as pipeline:
        refused = refusals(pipeline, folder)
        pipeline.load(folder)
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(3, 6)]
        return {"again": again, "expected": expected, "losses": losses, "steps": pipeline.steps, "refused": refused}


def refusals(pipeline: Pipeline, folder: Path) -> dict[str, str]:
    """What this rank is told of checkpoints that one rank alone cannot read or write; the run goes on after each."""
    before = {name: tensor.detach().clone() for name, tensor in pipeline.state_dict().items()}
    mine = folder.with_name(f"of rank {dist.get_rank()}")
    shutil.copytree(folder, mine)
    weight = next(iter(pipeline.state_dict().values()), torch.zeros(1)).detach()
    kept = weight.clone()

    def told(work: Callable[[], Any]) -> str:
        try:
            work()
        except AssignerError as error:
            return f"{type(error).__name__}: {error.message}"
        return "nothing"

    def change(**parts: Any) -> None:
        facts = json.loads((mine / "training.json").read_text())
        (mine / "training.json").write_text(json.dumps({**facts, **parts}))

    found = {}
    if dist.get_rank() == 1:
        change(steps=-1)
    found["one is damaged"] = told(lambda: pipeline.load(mine))
    change(steps=4 + dist.get_rank())
    found["they differ"] = told(lambda: pipeline.load(mine))
    if dist.get_rank() == 1:
        weight.fill_(float("nan"))
    found["a weight is NaN on one"] = told(lambda: pipeline.save(folder, force=True))
    weight.copy_(kept)
    state = pipeline.state_dict()
    found["changed"] = str(pipeline.steps or [name for name in before if not torch.equal(before[name], state[name])])
    return found


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases: dict[str, Callable[[], Any]] = {name: functools.partial(written, name) for name in PLANS}
    cases |= {"random plans": drawn, "accumulation": accumulation}
    found = {name: case() for name, case in cases.items() if not names or name in names}
    found |= {"dropout": dropout(), "leaks": leaks()}
    found["fingerprint"] = make_plan(language()).workload.fingerprint
    found["checkpoint"] = checkpoints(folder / "checkpoint")
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
