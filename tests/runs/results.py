"""Metrics and outputs of steps and evaluations on three ranks, beside plain PyTorch.

    torchrun --nproc-per-node 3 tests/runs/results.py FOLDER [CASE...]

Writes FOLDER/RANK.json: case -> what this rank found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner import AssignerError, Pipeline, StepResult, load_trace

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from loss_cases import rare_differences
from metric_cases import METRICS, forked, lossy, whole
from workloads import Reference, graph_of, make_plan, skips

if TYPE_CHECKING:
    from collections.abc import Callable

SKIPS = [(1, ["parts.0"]), (0, ["parts.1"]), (2, ["parts.2", "last"])]
LOSSY = [(1, ["tokens", "blocks.0"]), (2, ["blocks.1"]), (0, ["blocks.2"]), (1, ["head"])]


def apart(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest difference of two dicts."""
    assert found.keys() == expected.keys()
    return max(abs(found[name] - expected[name]) for name in expected)


def steps(schedule: str, *, remat: bool, folder: Path) -> dict[str, float]:
    """Full and ragged batches, metrics everywhere and outputs on one rank after the other, with a trace."""
    made = replace(skips(), metrics=METRICS)
    reference, worst = Reference(made), {"loss": 0.0, "metrics": 0.0, "outputs": 0.0, "weights": 0.0}
    plan = make_plan(made, SKIPS, schedule=schedule, in_flight=3 if schedule == "1f1b" else None)
    with Pipeline(made, plan, remat="always" if remat else "never", graph=graph_of(made)) as pipeline:
        with pipeline.trace(folder / f"{schedule}.json"):
            for n, rows in enumerate((8, 5, 8, 1)):
                batch = made.make_batch(rows, n)
                outputs = reference.output(batch[0])
                expected, to = whole(outputs, batch[1]), "all" if n == 3 else n % 3
                evaluated = pipeline.evaluate(batch, outputs_to=to)
                stepped = pipeline.step(batch, outputs_to=to)
                worst["loss"] = max(worst["loss"], abs(evaluated - stepped), abs(stepped - reference.step(batch)))
                for each in (evaluated, stepped):
                    worst["metrics"] = max(worst["metrics"], apart(each.metrics, expected))
                    assert each.weight == rows
                    assert (each.outputs is not None) == (to in ("all", pipeline.rank))
                    if each.outputs is not None:
                        worst["outputs"] = max(worst["outputs"], float((each.outputs - outputs).abs().max()))
        worst["weights"] = reference.distance(pipeline.named_parameters())
    if dist.get_rank() == 0:
        assert load_trace(folder / f"{schedule}.json").steps == 2  # those of 8 rows
    return worst


def several_makers() -> dict[str, Any]:
    """Micro-batches of two graphs whose outputs two ranks make: metrics of both, and outputs are refused."""
    made = forked()
    with Pipeline(made, make_plan(made, [(1, ["a"]), (2, ["b"])], micro_batches=2), graph=graph_of(made)) as pipeline:
        x, y = batch = made.make_batch(5, 0)
        torch.manual_seed(made.seed)
        with torch.no_grad():
            expected = torch.cat([made.model()(x[:3]), torch.empty(0, 1, dtype=x.dtype)])
            torch.manual_seed(made.seed)
            expected = torch.cat([expected, made.model()(x[3:])])
        found = {"metrics": apart(pipeline.evaluate(batch).metrics, whole(expected, y))}
        found["in training"] = apart(pipeline.step(batch).metrics, whole(expected, y))
        try:
            pipeline.step(batch, outputs_to=0)
        except AssignerError as error:
            return {**found, "refused": error.message}
    return found


def own_loss() -> dict[str, float]:
    """A model that returns (logits, loss): the loss of a set, and outputs with the loss among them."""
    made = lossy()
    reference, worst = Reference(made), {"outputs": 0.0, "loss": 0.0, "set": 0.0}
    with Pipeline(made, make_plan(made, LOSSY, micro_batches=3, remat=["head"]), graph=graph_of(made)) as pipeline:
        (ids, wanted), _ = made.make_batch(11, 9)
        parts = [((ids[at], wanted[at]), wanted[at]) for at in (slice(0, 8), slice(8, 11))]
        worst["set"] = abs(StepResult.over(map(pipeline.evaluate, parts)) - reference.output((ids, wanted))[1].item())
        for part in parts:
            logits, loss = reference.output(part[0])
            found = pipeline.step(part, outputs_to="all")
            worst["outputs"] = max(worst["outputs"], float((found.outputs[0] - logits).abs().max()))
            worst["outputs"] = max(worst["outputs"], float((found.outputs[1] - loss).abs()))
            worst["loss"] = max(worst["loss"], abs(found - reference.step(part)))
    return worst


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = [(1, ["parts.0"]), ({0: 1, 1: 1, 2: 2}, [*SKIPS[1][1], *SKIPS[2][1]])]
    cases: dict[str, Callable[[], Any]] = {
        "gpipe": lambda: steps("gpipe", remat=False, folder=folder),
        "1f1b": lambda: steps("1f1b", remat=True, folder=folder),
        "interleaved": lambda: steps("interleaved", remat=True, folder=folder),
        "own loss": own_loss,
        "constants": lambda: rare_differences(SKIPS, "1f1b", remat="always"),
        "constants, shared": lambda: rare_differences(shared, "gpipe"),
    }
    found = {name: case() for name, case in cases.items() if not names or name in names}
    found["several makers"] = several_makers()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
