"""On two ranks: hooks on shared weights, forwards that change state, and its moves to another worker.

torchrun --nproc-per-node 2 tests/runs/changing.py
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from assigner import Pipeline, UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from changing_models import CHANGING, made_of, micro_batched, tied_and_renormed
from workloads import Reference, graph_of, language, make_plan

from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from torch import nn

warnings.simplefilter("error")
EXACT = 1e-10
MOVING = ("InPlace", "Lazy", "Queue", "Momentum", "Renormed")


def hooked() -> nn.Module:
    """`language` with a hook on the weight that two workers share, and on one of the second worker's own."""
    model = language().model()
    model.tokens.weight.register_hook(torch.sin)
    model.blocks[1].inner.weight.register_hook(lambda gradient: gradient.sign())
    return model


made = replace(language(), model=hooked)
reference = Reference(made)
two = [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])]
with Pipeline(made, make_plan(made, two), graph=graph_of(made)) as pipeline:
    for n in range(3):
        batch = made.make_batch(8, n)
        assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT
        assert reference.gradient_distance(pipeline.gradients()) < EXACT
    pipeline.optimizer.zero_grad()
    reference.optimizer.zero_grad()
    for n in range(2):
        pipeline.step(made.make_batch(8, n), update=False)
        reference.loss(made.make_batch(8, n)).backward()
        assert reference.gradient_distance(pipeline.gradients()) < EXACT

for name in MOVING:
    made = made_of(CHANGING[name])
    reference = Reference(made)
    layouts = [[(0, ["first", "middle"]), (1, ["last"])], [(0, ["first"]), (1, ["middle", "last"])]]
    plans = [make_plan(made, stages, micro_batches=2, remat=["middle"]) for stages in layouts]
    with Pipeline(made, plans[0], graph=graph_of(made)) as pipeline:
        for n in range(4):
            batch = made.make_batch(4, n)
            assert abs(pipeline.step(batch) - micro_batched(reference, batch, 2)) < EXACT, (name, n)
            pipeline.move(plans[(n + 1) % 2])
        assert reference.distance(pipeline.state_dict().items()) < EXACT, name

made = replace(language(), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
reference = Reference(made)
turned = [(1, ["tokens", "blocks.0"]), (0, ["blocks.1", "blocks.2", "head"])]
with Pipeline(made, make_plan(made, two), graph=graph_of(made)) as pipeline:
    ours, theirs = pipeline.optimizer.state, reference.optimizer.state
    for n in range(3):
        assert abs(pipeline.step(made.make_batch(8, n)) - reference.step(made.make_batch(8, n))) < EXACT
        for state in (ours, theirs):
            for moments in state.values():
                moments["exp_avg"].mul_(0.5)
        pipeline.move(make_plan(made, (turned, two)[n % 2]))  # a warning would be an error
    kept = [moments["exp_avg"] for moments in ours.values()], [*ours.values()][-1]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipeline.move(make_plan(made, two))
    assert [str(each.message).count("the optimizer's state of") for each in told] == [3]
    assert told[0].filename == __file__
    assert not kept[1]  # of a parameter that has left

model = made_of(CHANGING["InPlace"]).model()
made = replace(made_of(CHANGING["InPlace"]), model=lambda: model)
with Pipeline(made, make_plan(made, layouts[0]), graph=partition_graph(made)) as pipeline:
    pipeline.step(made.make_batch(4, 0))
    try:
        model.middle.scale.sum()
        raise AssertionError("what another rank's forward has moved was read as it was built")
    except UsageError as error:
        assert "the script uses middle.scale" in str(error)  # noqa: PT017 - this is no test function

made = made_of(CHANGING["Counting"])
with Pipeline(made, make_plan(made, layouts[0], micro_batches=2), graph=graph_of(made)) as pipeline:
    losses = [pipeline.step(made.make_batch(4, 0))]
    try:
        pipeline.move(make_plan(made, layouts[1]))
        raise AssertionError("what forward has changed was lost")
    except UsageError as error:
        assert "that forward has changed, cannot go to another worker" in str(error)  # noqa: PT017 - no test function
    losses.append(pipeline.step(made.make_batch(4, 0)))  # it goes on under the old plan
    assert losses[0] != losses[1]

made = tied_and_renormed()
try:
    with Pipeline(made, make_plan(made, [(0, ["table", "body"]), (1, ["head"])]), graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
    raise AssertionError("another worker read old weights")
except UsageError as error:
    assert "writes table.weight, which another worker holds too" in str(error)  # noqa: PT017 - no test function
