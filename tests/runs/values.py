"""On two ranks, in one process group: values of every kind on the wire, other graphs, eval and outputs.

    torchrun --nproc-per-node 2 tests/runs/values.py FOLDER [CASE...]

Writes FOLDER/RANK.json: case -> what this rank found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from assigner import Pipeline
from assigner.runtime.step.stepmessages import StepValues

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from odd_values import CASES
from workloads import Reference, graph_of, language, make_plan, towers

ACROSS = [(1, ["a"]), (0, ["b"]), (1, ["c"])]
LANGUAGE = [(1, ["tokens", "blocks.0"]), (0, ["blocks.1"]), (1, ["blocks.2"]), (0, ["head"])]


def distance(found: Any, expected: Any) -> float:
    """The largest difference; infinite where structure, types, shapes or plain values differ."""
    if pytree.tree_structure(found) != pytree.tree_structure(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if not isinstance(other, torch.Tensor):
            worst = max(worst, 0.0 if one == other and type(one) is type(other) else float("inf"))
        elif one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        elif other.numel():
            worst = max(worst, float((one - other).abs().max()))
    return worst


def case(name: str) -> dict[str, float]:
    """Training with eval between the steps, across ranks: the largest differences."""
    made = CASES[name]()
    reference = Reference(made)
    found = {"loss": 0.0, "gradients": 0.0, "eval": 0.0, "forward": 0.0}
    for schedule in ("gpipe", "interleaved"):
        reference = Reference(made)
        plan = make_plan(made, ACROSS, schedule=schedule, remat=["b"] if schedule == "gpipe" else [])
        with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
            for n, rows in enumerate((8, 5)):
                batch = made.make_batch(rows, n)
                found["loss"] = max(found["loss"], abs(pipeline.step(batch) - reference.step(batch)))
                found["gradients"] = max(found["gradients"], reference.gradient_distance(pipeline.gradients()))
                expected = reference.output(batch[0])
                off = abs(pipeline.evaluate(batch) - float(made.compute_loss(expected, batch[1])))
                found["eval"] = max(found["eval"], off)
                output = pipeline.forward(batch[0], to=n)
                here = pipeline.rank == n
                assert here or output is None
                found["forward"] = max(found["forward"], distance(output, expected) if here else 0.0)
    return found


def other_shapes() -> dict[str, float]:
    """Lengths and rows that the first capture does not hold for, in training and in eval; outputs everywhere."""
    made = language()
    reference = Reference(made)
    worst = {"loss": 0.0, "gradients": 0.0, "forward": 0.0}
    with Pipeline(made, make_plan(made, LANGUAGE), graph=graph_of(made)) as pipeline:
        for n, (rows, length) in enumerate([(8, 5), (5, 5), (8, 1), (1, 4), (8, 6), (3, 1), (8, 5)]):
            ids, targets = (each[:, :1].expand(-1, length).contiguous() + n for each in made.make_batch(rows, n))
            batch = ids % 11, targets % 11
            output = pipeline.forward(batch[0], to=None)
            worst["forward"] = max(worst["forward"], distance(output, reference.output(batch[0])))
            worst["loss"] = max(worst["loss"], abs(pipeline.step(batch) - reference.step(batch)))
            worst["gradients"] = max(worst["gradients"], reference.gradient_distance(pipeline.gradients()))
        worst["weights"] = reference.distance(pipeline.state_dict().items())
    return worst


def dropout_after_eval() -> dict[str, float]:
    """Losses of training with dropout are to the last bit the same with evaluations between the steps."""
    made = language(dropout=0.4)
    graph = graph_of(made)
    with (
        Pipeline(made, make_plan(made, LANGUAGE), graph=graph) as one,
        Pipeline(made, make_plan(made, LANGUAGE), graph=graph) as other,
    ):
        worst = 0.0
        for n in range(3):
            batch = made.make_batch(8, n)
            one.evaluate(made.make_batch(7, n))
            one.forward(made.make_batch(3, n)[0])
            worst = max(worst, abs(one.step(batch) - other.step(batch)))
    return {"loss": worst}


def inference() -> dict[str, Any]:
    """An inference-only plan on one rank, whose output another rank wants; and one across both."""
    made = towers()
    reference = Reference(made)
    inputs, _ = made.make_batch(7, 0)
    expected = reference.output(inputs)
    found: dict[str, Any] = {}
    plans = {"one": [(0, ["left", "right", "join"])], "two": [(1, ["left"]), (0, ["right", "join"])]}
    for name, stages in plans.items():
        with Pipeline(made, make_plan(made, stages), graph=graph_of(made), training=False) as pipeline:
            output = pipeline.forward(inputs, to=1)
            found[name] = distance(output, expected) if pipeline.rank == 1 else float(output is not None)
            found[f"{name}: held"] = sum(parameter.requires_grad for _, parameter in pipeline.named_parameters())
            assert all(each.step == StepValues() for each in pipeline._installed.inference._executors.values())
    return found


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {name: case(name) for name in CASES if not names or name in names}
    if not names or "other shapes" in names:
        found["other shapes"] = other_shapes()
    found["dropout after eval"] = dropout_after_eval()
    found["inference"] = inference()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
