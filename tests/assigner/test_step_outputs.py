"""Outputs of steps and evaluations without a second forward, numbers among them; and the result as a float."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from metric_cases import layers, lossy
from torch import nn
from workloads import WIDTH, Reference, graph_of, make_plan, pipeline_of, workload

from assigner import Pipeline, StepResult
from assigner.errors import UsageError

EXACT = 1e-10


def in_training(reference: Reference, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return reference.model(inputs)


class Noting(nn.Linear):
    """Counts its forwards."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.dropout(super().forward(x), 0.5, self.training)


def test_outputs_come_with_the_loss():
    """Those of the one forward that was made: in training with its dropout, in eval what `forward` gives."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Noting(WIDTH, 1)))
    with Pipeline(made, make_plan(made, micro_batches=3), graph=graph_of(made)) as pipeline:
        last = next(
            each
            for held in pipeline._installed.share.modules.values()
            for each in held.modules()
            if isinstance(each, Noting)
        )
        for rows, cuts in ((8, 3), (5, 2), (1, 1)):
            batch = made.make_batch(rows, rows)
            before = last.calls
            found = pipeline.step(batch, outputs_to=0, update=False)
            assert last.calls - before == cuts
            assert F.mse_loss(found.outputs, batch[1]).item() == pytest.approx(found, abs=EXACT)
            assert not found.outputs.requires_grad
            assert pipeline.step(batch).outputs is None
            found = pipeline.evaluate(batch, outputs_to="all")
            assert torch.equal(found.outputs, pipeline.forward(batch[0]))
            assert pipeline.evaluate(batch).outputs is None


class Several(nn.Module):
    """Rows behind, a weight, a number of the batch, plain values, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("table", torch.arange(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        made = self.b(self.a(x).tanh())
        return {
            "made": made, "behind": made.t(), "weight": self.b.weight, "mean": made.mean(), "table": self.table,
            "plain": [None, "word", 3],
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_outputs_are_what_the_forward_made(micro_batches, remat):
    """Though the loss writes into them, and the update into a weight among them; a mean is that of all rows."""

    def loss(outputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
        return outputs["made"].sub_(targets).square().mean() + outputs["mean"]

    made = workload(Several, "*", loss=loss)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        for rows in (8, 5):
            x, _ = batch = made.make_batch(rows, rows)
            expected = {
                key: each.clone() if isinstance(each, torch.Tensor) else each
                for key, each in in_training(reference, x).items()
            }
            found = pipeline.step(batch, outputs_to=0)
            assert found == pytest.approx(reference.step(batch), abs=EXACT)
            for key, each in expected.items():
                if isinstance(each, torch.Tensor):
                    torch.testing.assert_close(found.outputs[key], each, rtol=0, atol=EXACT)
                else:
                    assert found.outputs[key] == each
            outputs = pipeline.evaluate(batch, outputs_to=0).outputs
            torch.testing.assert_close(outputs["made"], reference.output(x)["made"], rtol=0, atol=EXACT)
            torch.testing.assert_close(pipeline.forward(x)["mean"], reference.output(x)["mean"], rtol=0, atol=EXACT)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_loss_that_the_model_makes(remat):
    """(logits, loss): the loss picks it, and it comes out as the batch's, by the tokens that count."""
    made = lossy()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=3), remat=remat) as pipeline:
        for rows in (8, 5):
            batch = made.make_batch(rows, rows)
            logits, loss = reference.output(batch[0])
            found = pipeline.evaluate(batch, outputs_to=0)
            torch.testing.assert_close(found.outputs, (logits, loss), rtol=0, atol=EXACT)
            found = pipeline.step(batch, outputs_to=0)
            torch.testing.assert_close(found.outputs, (logits, loss), rtol=0, atol=EXACT)
            assert found == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT


def test_numbers_whose_weights_nobody_knows():
    """A forward has no targets to weigh, and beside summed losses a number may be no sum: refused with a way out."""
    made = lossy()
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    inputs, _ = batch = made.make_batch(8, 0)
    with pipeline, pytest.raises(UsageError, match=r"output\[1\] of shape \(\) differs") as refused:
        pipeline.forward(inputs)
    assert "outputs_to" in refused.value.hint
    made = replace(made, reduction="sum", weight=None)
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    with pipeline, pytest.raises(UsageError, match=r"output\[1\] of shape \(\) differs"):
        pipeline.evaluate(batch, outputs_to=0)


def test_who_may_get_outputs():
    """A rank of the run, or all; others are refused before anything is computed, and the run goes on."""
    made = layers()
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(8, 0)
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(UsageError, match="there is no rank 1"):
                call(batch, outputs_to=1)
            for wrong in ("last", True):
                with pytest.raises(UsageError, match=f"outputs_to={wrong!r} is not allowed"):
                    call(batch, outputs_to=wrong)
        assert pipeline.steps == 0
        assert pipeline.step(batch, outputs_to="all").outputs.shape == (8, 1)


def test_a_result_is_a_float(tmp_path):
    """It prints, compares, adds up and is written as the number that it is; copies keep what is with it."""
    made = layers(loss_over="batch")
    with pipeline_of(made, make_plan(made)) as pipeline:
        found = pipeline.step(made.make_batch(8, 0), outputs_to=0)
        assert isinstance(found, float)
        assert (str(found), f"{found:.3f}", json.dumps({"loss": found})) == (
            str(float(found)), f"{float(found):.3f}", json.dumps({"loss": float(found)}),
        )  # fmt: skip
        assert type(found + found) is float
        pipeline.save(tmp_path / "checkpoint", {"best": min(found, 1e9)})
        best = pipeline.load(tmp_path / "checkpoint")["best"]
        assert (best, type(best)) == (found, float)
        for each in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            assert (type(each), each, each.metrics, each.weight) == (StepResult, found, found.metrics, 8.0)
            assert torch.equal(each.outputs, found.outputs)
            assert StepResult.over([each, found]).metrics == pytest.approx(found.metrics)
