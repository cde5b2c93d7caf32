"""Ranks that do not do the same, each way in processes forked from this one.

    python tests/runs/disagreeing.py FOLDER

Writes FOLDER/found.json: way -> exit codes and what each of three ranks wrote to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import torch
from failures import MADE, PLAN, run
from torch import nn

from assigner import Pipeline
from assigner.runtime import pipeline as pipelines
from assigner.schedule.orders import listed

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, make_plan, numbers, workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan


def zeros(pipeline: Pipeline) -> None:
    inputs, targets = MADE.make_batch(8, 1)
    pipeline.step((torch.zeros_like(inputs), targets))


def other_targets(pipeline: Pipeline) -> None:
    pipeline.step((MADE.make_batch(8, 1)[0], MADE.make_batch(8, 2)[1]))


def fewer_rows(pipeline: Pipeline) -> None:
    pipeline.step(MADE.make_batch(6, 1))


def evaluates(pipeline: Pipeline) -> None:
    pipeline.evaluate(MADE.make_batch(8, 1))


def updates(pipeline: Pipeline) -> None:
    pipeline.optimizer.step()
    pipeline.step(MADE.make_batch(8, 1))


def another_rate(pipeline: Pipeline) -> None:
    pipeline.optimizer.param_groups[0]["lr"] = 0.5
    pipeline.step(MADE.make_batch(8, 1))


def drops(pipeline: Pipeline) -> None:
    pipeline.optimizer.zero_grad()
    pipeline.step(MADE.make_batch(8, 1))


def saves(pipeline: Pipeline) -> None:
    pipeline.save("saved")


def saves_best(pipeline: Pipeline) -> None:
    pipeline.save("best")


def saves_last(pipeline: Pipeline) -> None:
    """What the others do: one rank alone was to save before, and they have come to the next checkpoint."""
    pipeline.save("last")


def skips_update(pipeline: Pipeline) -> None:
    """As where a script's own scaler has found an inf in this rank's gradients alone."""
    pipeline.step(MADE.make_batch(8, 1), update=False)
    pipeline.step(MADE.make_batch(8, 2), update=False)


def updates_by_hand(pipeline: Pipeline) -> None:
    """What the others do."""
    pipeline.step(MADE.make_batch(8, 1), update=False)
    pipeline.optimizer.step()


def clips(pipeline: Pipeline) -> None:
    pipeline.clip_grad_norm_(1.0)


def moves(pipeline: Pipeline) -> None:
    pipeline.move(PLAN)


def saves_in_a_thread(pipeline: Pipeline) -> None:
    """While this rank is in a step."""

    def save(_: torch.Tensor) -> None:
        thread = threading.Thread(target=pipeline.save, args=("saved",), name="other")
        thread.start()
        thread.join()

    for _, parameter in pipeline.named_parameters():
        parameter.register_hook(save)
    pipeline.step(MADE.make_batch(8, 1))


def leaves(_: Pipeline) -> None:
    """Nothing more: the block ends."""


def lacks_inputs(pipeline: Pipeline) -> None:
    pipeline.step((None, MADE.make_batch(8, 1)[1]))


def lacks_all(pipeline: Pipeline) -> None:
    pipeline.evaluate(None)


class Rejoining(nn.Module):
    """The input is read once more, where a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x: torch.Tensor, *, rejoins: bool) -> torch.Tensor:
        made = self.parts[1](self.parts[0](x))
        return self.parts[2](made + x if rejoins else made)


def flagged(rows: int, generator: torch.Generator, *, rejoins: bool = False) -> tuple[dict[str, Any], torch.Tensor]:
    x, y = numbers(rows, generator)
    return {"x": x, "rejoins": rejoins}, y


def another_graph() -> None:
    """Another rank needs inputs in another graph than the plan's."""
    made = workload(Rejoining, "parts.*", batch=flagged)
    with Pipeline(
        made, make_plan(made, [(0, ["parts.0"]), (1, ["parts.1"]), (2, ["parts.2"])]), graph=graph_of(made)
    ) as pipeline:
        for rejoins in (False, True):
            inputs, targets = flagged(8, torch.Generator(), rejoins=rejoins)
            pipeline.step((inputs if pipeline.needs_inputs else None, targets if pipeline.needs_targets else None))


def two(odd: int, way: str) -> None:
    """Two pipelines, whose first stages are on different ranks; then one rank goes on otherwise than the others."""
    is_odd, batch = int(os.environ["RANK"]) == odd, MADE.make_batch(8, 0)
    turned = make_plan(MADE, [(1, ["0"]), (2, ["1"]), (0, ["2"])])
    first = Pipeline(MADE, PLAN, timeout_s=60.0, graph=graph_of(MADE))
    with Pipeline(MADE, turned, timeout_s=60.0, graph=graph_of(MADE)) as second, first:
        first.step(batch)
        second.step(batch)
        if way == "half made":
            if is_odd:
                pipelines.KeptModel = Mock(side_effect=ArithmeticError("no memory of it"))
            Pipeline(MADE, PLAN, timeout_s=60.0, graph=graph_of(MADE))
        elif way == "raises between":
            if is_odd:
                raise KeyError("the user's own")
            while True:
                second.step(batch)
        elif is_odd:
            second.step(batch)
        else:
            first.step(batch)


def train(odd: int, way: Callable[[Pipeline], None]) -> None:
    """One step together; then one rank does something else, and the others go on."""
    with Pipeline(MADE, PLAN, timeout_s=60.0, graph=graph_of(MADE)) as pipeline:
        pipeline.step(MADE.make_batch(8, 0))
        if int(os.environ["RANK"]) == odd:
            way(pipeline)
        elif way in OTHERS:
            OTHERS[way](pipeline)
        else:
            evaluating = way is lacks_all
            (pipeline.evaluate if evaluating else pipeline.step)(MADE.make_batch(8, 1))


def unlike_plans(odd: Plan) -> None:
    """Rank 1 was given another plan from the start."""
    plan = odd if os.environ["RANK"] == "1" else LISTED
    with Pipeline(MADE, plan, timeout_s=60.0, graph=graph_of(MADE)) as pipeline:
        pipeline.step(MADE.make_batch(8, 0))


OTHERS = {saves_best: saves_last, skips_update: updates_by_hand}
WAYS = {
    "zeros for inputs": (1, zeros),
    "other targets": (2, other_targets),
    "fewer rows": (1, fewer_rows),
    "evaluate": (1, evaluates),
    "an update": (2, updates),
    "learning rate": (1, another_rate),
    "gradients dropped": (2, drops),
    "save": (1, saves),
    "save on rank 0": (0, saves),
    "save elsewhere": (0, saves_best),
    "an update left out": (0, skips_update),
    "clipping": (2, clips),
    "a thread": (1, saves_in_a_thread),
    "move": (1, moves),
    "leaves": (1, leaves),
    "leaves on rank 0": (0, leaves),
    "no inputs": (0, lacks_inputs),
    "no batch": (2, lacks_all),
    "another graph": (-1, leaves),
}

TWO = {"another pipeline": 1, "another pipeline on rank 0": 0, "half made": 1, "raises between": 2}

LISTED = listed(PLAN)
COUNT = range(PLAN.micro_batches)
SOONER = {"worker:2/cpu": " ".join(f"2F{m} 2B{m}" for m in COUNT)}
ODD_PLANS = {
    "another order": replace(LISTED, orders={**LISTED.orders, **SOONER}),
    "another schedule": PLAN,
    "other workers": make_plan(MADE, [(1, ["0"]), (0, ["1"]), (2, ["2"])]),
    "more ranks": make_plan(MADE, [(0, ["0"]), (1, ["1"]), (3, ["2"])]),
}


def main(folder: Path, names: list[str]) -> None:
    found = {}
    gc.freeze()  # the ranks share torch's objects with this process: to collect them at their end would copy them all
    for n, (name, way) in enumerate(WAYS.items()):
        if not names or name in names:
            body = another_graph if name == "another graph" else partial(train, *way)
            found[name] = run(folder / str(n), body, None, quickly=True)
    for name, rank in TWO.items():
        if not names or name in names:
            found[name] = run(folder / name, partial(two, rank, name), None, quickly=True)
    for name, odd in ODD_PLANS.items():
        if not names or name in names:
            found[name] = run(folder / name, partial(unlike_plans, odd), None, quickly=True)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
