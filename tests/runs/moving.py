"""On three ranks: a training that moves from plan to plan equals the plain one; a rank that finds a difference fails.

torchrun --nproc-per-node 3 tests/runs/moving.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from assigner import Pipeline, UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from torch import nn
from workloads import Reference, graph_of, language, make_plan, next_token, normalised, tokens, workload

EXACT = 1e-10
LAYOUTS = [
    [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2"]), (2, ["head"])],
    [(2, ["tokens"]), (0, ["blocks.0", "blocks.1", "blocks.2", "head"])],
    [(1, ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"])],
    [(1, ["tokens"]), (0, ["blocks.0", "blocks.1"]), (2, ["blocks.2"]), (1, ["head"])],
]

made = language()
reference = Reference(made)
plans = [make_plan(made, stages, micro_batches=n + 1, remat=["blocks.1"]) for n, stages in enumerate(LAYOUTS)]
plans[1] = make_plan(made, LAYOUTS[1], schedule="1f1b")
with Pipeline(made, plans[0], graph=graph_of(made)) as pipeline:
    ours = torch.optim.lr_scheduler.StepLR(pipeline.optimizer, 2, gamma=0.5)
    theirs = torch.optim.lr_scheduler.StepLR(reference.optimizer, 2, gamma=0.5)
    for step in range(10):
        batch = made.make_batch(8, step)
        difference = pipeline.step(batch) - reference.step(batch)
        assert abs(difference) < EXACT, (step, difference)
        assert reference.distance(pipeline.named_parameters()) < EXACT, step
        ours.step()
        theirs.step()
        pipeline.move(plans[(step + 1) % len(plans)])
        assert pipeline.partitions == tuple(
            name for rank, held in LAYOUTS[(step + 1) % len(plans)] if rank == pipeline.rank for name in held
        )
    pipeline.step(made.make_batch(8, 0), update=False)
    try:
        pipeline.move(plans[0])
        raise AssertionError("gradients were lost")
    except UsageError as error:
        assert "wait for their update" in str(error)  # noqa: PT017 - this is no test function
    pipeline.optimizer.step()
    pipeline.optimizer.zero_grad()
    pipeline.move(plans[0])
    reference.step(made.make_batch(8, 0))
    assert reference.distance(pipeline.named_parameters()) < EXACT
    reference.optimizer.zero_grad()
    for step in range(3):  # gradients add up over updates, and over moves
        pipeline.step(made.make_batch(8, step), update=False)
        pipeline.optimizer.step()
        reference.loss(made.make_batch(8, step)).backward()
        reference.optimizer.step()
        kept = pipeline.optimizer.state_dict()
        together = {name: each for n in range(3) for name, each in pipeline.share(kept["state"], n).items()}
        pipeline.move(plans[step + 1])
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert reference.gradient_distance(pipeline.gradients()) < EXACT
        if dict(pipeline.named_parameters()).keys() - kept["state"].keys():
            try:
                pipeline.optimizer.load_state_dict(kept)
                raise AssertionError("moments were lost")
            except UsageError as error:
                assert "has nothing of" in str(error)  # noqa: PT017 - this is no test function
        pipeline.optimizer.load_state_dict({**kept, "state": together})

made = workload(normalised)
reference = Reference(made)
plans = [make_plan(made, stages, micro_batches=1) for stages in ([(0, "0"), (1, "123")], [(2, "01"), (0, "23")])]
with Pipeline(made, plans[0], graph=graph_of(made)) as pipeline:
    for step in range(4):
        batch = made.make_batch(8, step)
        assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT
        pipeline.move(plans[(step + 1) % 2])
        assert reference.distance(pipeline.state_dict().items()) < EXACT

for nesterov in (False, True):  # momentum that is sparse, but where two workers add up the gradient
    made = workload(
        lambda: nn.Sequential(nn.Embedding(17, 4, sparse=True), nn.Linear(4, 17)), "*", batch=tokens, loss=next_token,
        optimizer=lambda p, nesterov=nesterov: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=nesterov),
    )  # fmt: skip
    reference = Reference(made)
    layouts = [[(0, "0"), (1, "1")], [(2, "0"), (0, "1")], [({0: 1, 2: 1}, "0"), (1, "1")]]
    plans = [make_plan(made, stages, micro_batches=2) for stages in layouts]
    with Pipeline(made, plans[0], graph=graph_of(made)) as pipeline:
        for step in range(7):
            batch = made.make_batch(8, step)
            assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT, step
            assert reference.distance(pipeline.named_parameters()) < EXACT, step
            pipeline.move(plans[(step + 1) % 3])
