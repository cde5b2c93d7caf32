"""On two ranks: listed orders under what a training does beside steps, and a rank with another order than the rest.

torchrun --nproc-per-node 2 tests/runs/listed.py FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from assigner import Pipeline
from assigner.errors import AssignerError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from drawn_orders import with_drawn_order
from workloads import Reference, graph_of, language, make_plan, normalised, workload

EXACT = 1e-10
FOLDER = Path(sys.argv[1])

# ties, clipping, evaluation, a checkpoint and moves: tokens and head share a weight
made = language()
graph, reference = graph_of(made), Reference(made)
ACROSS = [(0, ["tokens", "blocks.0"]), (1, ["blocks.1"]), (0, ["blocks.2"]), (1, ["head"])]
rule = make_plan(made, ACROSS, remat=["blocks.1"], schedule="interleaved-1f1b")
plans = [with_drawn_order(rule, graph.edges, random.Random(seed)) for seed in range(2)]
plain = make_plan(made, [(1, ["tokens", "blocks.0", "blocks.1"]), (0, ["blocks.2", "head"])], schedule="1f1b")
order = [plans[0], plain, plans[1], rule, plans[0]]
with Pipeline(made, order[0], graph=graph) as pipeline:
    for step, following in enumerate([*order[1:], plans[1]]):
        batch = made.make_batch(8, step)
        loss = pipeline.step(batch, max_norm=0.05)
        reference.optimizer.zero_grad()
        expected = reference.loss(batch)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
        reference.optimizer.step()
        assert abs(loss - expected.item()) < EXACT, (step, loss, expected)
        assert reference.distance(pipeline.named_parameters()) < EXACT, step
        for rows in (8, 3):  # three rows are fewer micro-batches than are listed
            other = made.make_batch(rows, 50 + step)
            assert abs(pipeline.evaluate(other) - reference.loss(other).item()) < EXACT, (step, rows)
        pipeline.move(following)
    pipeline.save(FOLDER / "saved", {})
with Pipeline(made, plain, graph=graph) as pipeline:
    pipeline.load(FOLDER / "saved")
    assert reference.distance(pipeline.named_parameters()) < EXACT

# running statistics are those of whole batches, and what a step draws is its micro-batch's, whatever the order
made = workload(normalised)
graph, reference = graph_of(made), Reference(made)
split = make_plan(made, [(0, "0"), (1, "1"), (0, "2"), (1, "3")])
mixed = with_drawn_order(split, graph.edges, random.Random(3))
with Pipeline(made, split, graph=graph) as pipeline:
    for step in range(3):
        pipeline.step(made.make_batch(8, step))
    wanted = {name: each.detach().clone() for name, each in pipeline.state_dict().items()}
with Pipeline(made, mixed, graph=graph) as pipeline:
    for step in range(3):
        pipeline.step(made.make_batch(8, step))
    for name, each in pipeline.state_dict().items():
        assert float((each.detach() - wanted[name]).abs().max()) < EXACT, name

# two ranks that have been given unlike orders are told so; nobody waits
with Pipeline(made, split, graph=graph, timeout_s=60) as pipeline:
    other = with_drawn_order(split, graph.edges, random.Random(4))
    try:
        pipeline.move(mixed if pipeline.rank else other)
        raise AssertionError("unlike orders went unnoticed")
    except AssignerError as error:
        assert "move" in str(error)  # noqa: PT017 - this is no test function
