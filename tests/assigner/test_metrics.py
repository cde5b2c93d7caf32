"""Metrics of steps and evaluations: those of the whole batch, and training does not notice them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from metric_cases import METRICS, forked, layers, lossy, whole
from workloads import Reference, graph_of, language, make_plan, pipeline_of

from assigner import Pipeline, StepResult
from assigner.errors import UsageError
from assigner.verification.checking import check_model

EXACT = pytest.approx


def steps_of(made: Any, *, micro_batches: int = 3, rows: tuple[int, ...] = (8, 5, 1), **options: Any) -> None:
    """Train and evaluate; losses and METRICS are the plain model's."""
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), **options) as pipeline:
        for n, count in enumerate(rows):
            batch = made.make_batch(count, n)
            expected = whole(reference.output(batch[0]), batch[1])
            found = pipeline.evaluate(batch)
            assert found.metrics == EXACT(expected, abs=1e-12)
            assert found.weight == count
            found = pipeline.step(batch)
            assert found == EXACT(reference.step(batch), abs=1e-12)
            assert found.metrics == EXACT(expected, abs=1e-12)


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("over", ["micro_batch", "batch"])
def test_metrics_are_those_of_the_batch(over, remat):
    """Means, counts and ratios, whatever the micro-batches, in training and in eval."""
    steps_of(layers(loss_over=over), remat=remat)


def test_micro_batches_of_several_graphs():
    """Their metrics add up as well, where each graph's output is made by another partition."""
    made = forked()
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline, torch.no_grad():
        torch.manual_seed(made.seed)
        model = made.model()
        for rows in (5, 8, 2):
            x, y = made.make_batch(rows, rows)
            expected = torch.cat([model(part) for part in x.tensor_split(2)]) if rows > 2 else model(x)
            assert pipeline.evaluate((x, y)).metrics == EXACT(whole(expected, y), abs=1e-12)


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("over", ["micro_batch", "batch"])
def test_a_metric_is_called_as_often_as_the_loss(over, remat):
    """Once for each micro-batch in their order, or once over the batch; without gradients and outside of its graph."""
    seen: list[Any] = []

    def watching(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert not torch.is_grad_enabled()
        assert not outputs.requires_grad
        seen.append(targets[0].item())
        return 0.0

    made = layers(metrics={"watching": watching}, loss_over=over)
    with pipeline_of(made, make_plan(made, micro_batches=3), remat=remat) as pipeline:
        for n, call in enumerate((pipeline.step, pipeline.evaluate, pipeline.step)):
            batch = made.make_batch(8, n)
            seen.clear()
            call(batch)
            assert seen == [part[0].item() for part in batch[1].tensor_split(1 if over == "batch" else 3)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_training_does_not_notice_a_metric(remat):
    """One that draws from every generator changes no mask of dropout: losses are the same to the last bit."""

    def drawing(*_: Any) -> float:
        return float(torch.rand(3).sum()) + random.random() + np.random.rand()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(torch.rand(()))
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten()) * (1 + noise)

    bare = replace(language(dropout=0.4), loss=loss)
    plan, graph = make_plan(language(dropout=0.4)), graph_of(language(dropout=0.4))
    losses = []
    for made in (bare, replace(bare, metrics={"drawing": drawing})):
        random.seed(1)
        with Pipeline(made, plan, graph=graph, remat=remat) as pipeline:
            losses.append([pipeline.step(made.make_batch(8, n)) for n in range(3)])
            assert set(pipeline.evaluate(made.make_batch(8, 0)).metrics) == set(made.metrics or {})
            losses[-1].append(random.random())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("over", ["micro_batch", "batch"])
def test_what_a_metric_draws_is_the_same_under_every_plan(over):
    """From each generator, in steps and evaluations, whatever else was drawn; another micro-batch has other draws."""

    def drawing(*_: Any) -> float:
        return float(torch.rand((), dtype=torch.float64)) + random.random() + np.random.rand()

    made = layers(metrics={"drawing": drawing}, loss_over=over)
    found = []
    for remat in ("never", "always"):
        random.seed(len(found))
        np.random.seed(len(found))
        torch.manual_seed(len(found))
        with Pipeline(made, make_plan(made), graph=graph_of(made), remat=remat) as pipeline:
            batches = [made.make_batch(8, n) for n in range(2)]
            found.append([pipeline.step(each).metrics["drawing"] for each in batches])
            found[-1].append(pipeline.evaluate(batches[0]).metrics["drawing"])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


VALUES = {
    "whole": lambda *_: 3, "truth": lambda *_: True, "array": lambda *_: np.float32(0.5),
    "count": lambda *_: np.int64(2), "half": lambda outputs, _: outputs.sum().half() * 0 + 0.25,
    "tensor": lambda *_: torch.tensor(7),
    "none": lambda *_: (0, 0), "some": lambda outputs, _: (outputs.shape[0], torch.tensor(2)), "nan": lambda *_: np.nan,
    "pair": lambda *_: [torch.tensor(True), 4.0],
}  # fmt: skip


def test_every_kind_of_number():
    """Numbers of Python, NumPy and torch; a count of 0 gives nan, and so does nan; their order is the workload's."""
    made = layers(metrics=VALUES)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        found = pipeline.step(made.make_batch(8, 0)).metrics
        expected = {
            "whole": 3.0, "truth": 1.0, "array": 0.5, "count": 2.0, "half": 0.25, "tensor": 7.0, "none": np.nan,
            "some": 2.0, "nan": np.nan, "pair": 0.25,
        }  # fmt: skip
        assert found == EXACT(expected, nan_ok=True)
        assert list(found) == list(VALUES)
        assert {type(each) for each in found.values()} == {float}


def test_summed_losses_have_summed_metrics():
    """Numbers add up as the losses do, pairs do not."""
    made = layers(
        loss=lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"), reduction="sum",
        metrics={"far": lambda outputs, targets: (outputs - targets).abs().sum(), **METRICS},
    )  # fmt: skip
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        batches = [made.make_batch(rows, rows) for rows in (8, 5)]
        results = [pipeline.evaluate(batch) for batch in batches]
        far = [(reference.output(x) - y).abs().sum().item() for x, y in batches]
        assert [each.metrics["far"] for each in results] == EXACT(far, abs=1e-12)
        together = StepResult.over(results)
        assert together == EXACT(sum(results))
        assert together.metrics["far"] == EXACT(sum(far))
        outputs, targets = (
            torch.cat(each) for each in zip(*((reference.output(x), y) for x, y in batches), strict=True)
        )
        assert together.metrics["near"] == EXACT(whole(outputs, targets)["near"])
        assert together / together.weight == EXACT(F.mse_loss(outputs, targets).item())


def test_weights_and_micro_batches_that_count_for_nothing():
    """A number counts by the workload's weight, and not at all at weight 0, whatever it is; a pair always counts."""
    made = layers(
        loss=lambda outputs, targets: (outputs - targets)[targets > 0].square().mean(),
        weight=lambda _, targets: (targets > 0).sum(),
        metrics={
            "error": lambda outputs, targets: (outputs - targets)[targets > 0].abs().mean(),
            "all": lambda outputs, targets: ((outputs - targets).abs().sum(), len(targets)),
        },
    )
    reference = Reference(made)
    x, y = made.make_batch(8, 0)
    y = y.abs()
    y[:4] *= -1
    y[6:] *= -1
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        far = (reference.output(x) - y).abs()
        for result in (pipeline.evaluate((x, y)), pipeline.step((x, y))):
            assert result.metrics == EXACT({"error": far[4:6].mean().item(), "all": far.mean().item()}, abs=1e-12)
            assert result.weight == 2


@pytest.mark.long
def test_several_batches_are_as_one():
    """Of a set whose last batch is smaller: loss, means and ratios, to the last digits; none is refused in words."""
    made = lossy(
        metrics={"right": lambda outputs, targets: ((outputs[0].argmax(-1) == targets).sum(), targets.numel())}
    )
    reference = Reference(made)
    (ids, wanted), _ = batch = made.make_batch(11, 3)
    parts = [((ids[at], wanted[at]), wanted[at]) for at in (slice(0, 8), slice(8, 11))]
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        found = StepResult.over(pipeline.evaluate(part) for part in parts)
        logits, loss = reference.output(batch[0])
        assert found == EXACT(loss.item(), abs=1e-12)
        assert found.metrics == EXACT({"right": (logits.argmax(-1) == wanted).double().mean().item()})
        assert found.weight == (wanted != -1).sum()
        again = StepResult.over([found, found])
        assert (again, again.metrics) == (EXACT(found), EXACT(found.metrics))
    with pytest.raises(UsageError, match="no results"):
        StepResult.over([])
    with pytest.raises(UsageError, match="unlike workloads"):
        StepResult.over([found, StepResult(1.0)])
    with pytest.raises(UsageError, match=r"1\.0 is a float, and no result of a step"):
        StepResult.over([1.0])


WRONG = {
    "gave None": lambda *_: None,
    r"gave a tensor of shape \(1,\) and type torch.float64": lambda outputs, _: outputs.mean(0).detach(),
    "gave a tensor of shape .* and type torch.complex64": lambda *_: torch.tensor(1j),
    "gave a str": lambda *_: "high",
    "gave a tuple of 3": lambda *_: (1, 2, 3),
    "gave a count that is a list of 1": lambda *_: (1, [2]),
    "gave a total that is an array of shape": lambda *_: (np.ones(2), 1),
    r"failed at .*test_metrics.py:\d+ .*: ZeroDivisionError: division by zero": lambda *_: 1 / 0,
    "writes into the outputs or the targets": lambda outputs, _: float(outputs.zero_().sum()),
    "writes into .* given": lambda _, targets: float(targets.add_(1).sum()),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_metric_is_named(said):
    """What fails, gives no number or writes where the loss reads is told by its name, with what to do."""
    made = layers(metrics={"good": METRICS["error"], "bad one": WRONG[said]})
    for call in ("step", "evaluate"):
        pipeline = pipeline_of(made, make_plan(made, micro_batches=2))
        with pipeline, pytest.raises(UsageError, match=rf"Workload.metrics\['bad one'\] {said}") as refused:
            getattr(pipeline, call)(made.make_batch(8, 0))
        assert refused.value.hint


def test_a_metric_that_writes_in_inference_mode_has_a_copy():
    """torch counts no writes there, and the loss is not to see them."""
    made = layers(metrics={"zero": lambda outputs, _: float(outputs.zero_().sum())})
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline, torch.inference_mode():
        batch = made.make_batch(8, 0)
        loss = pipeline.evaluate(batch)
        assert loss == EXACT(Reference(made).loss(batch).item(), abs=1e-12)


def by_numpy(outputs, targets):
    """The rows' best scores, by arrays that are changed in place."""
    scores, wanted = outputs.numpy(), targets.numpy()
    scores -= scores.max()
    wanted *= 0
    return float(scores.sum() + wanted.sum())


def test_a_metric_that_writes_through_numpy_has_a_copy():
    """torch does not see these writes either; the loss, its gradients and the next metric see none of them."""
    made = layers(metrics={"first": by_numpy, "second": by_numpy})
    for remat in ("never", "always"):
        reference = Reference(made)
        with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat) as pipeline:
            for n in range(2):
                result = pipeline.step(made.make_batch(8, n))
                assert result == EXACT(reference.step(made.make_batch(8, n)), abs=1e-12)
                assert result.metrics["first"] == result.metrics["second"]
            assert reference.distance(pipeline.named_parameters()) < 1e-12


def test_one_form_of_value():
    """Now a number and now a pair is refused."""
    made = layers(metrics={"either": lambda outputs, _: 1.0 if len(outputs) == 3 else (1, 1)})
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    with pipeline, pytest.raises(UsageError, match="gave a number for some micro-batches and a pair for others"):
        pipeline.step(made.make_batch(8, 0))


def test_ranks_must_ask_alike(monkeypatch):
    """What the ranks compare before a call has the metrics' names and who wants outputs; else it is as it was."""
    made = layers()
    for each, said in ((made, ", outputs_to=0, metrics=['error', 'near', 'relative']"), (layers(metrics=None), "")):
        with pipeline_of(each, make_plan(each)) as pipeline:
            calls: list[str] = []
            monkeypatch.setattr(pipeline._installed.comparison, "check", lambda *_, **__: None)
            given = pipeline._installed.comparison.given
            monkeypatch.setattr(
                pipeline._installed.comparison, "given",
                lambda call, *args, calls=calls, given=given, **more: calls.append(call) or given(call, *args, **more),
            )  # fmt: skip
            for call in (pipeline.step, pipeline.evaluate):
                call(made.make_batch(8, 0), outputs_to=0 if said else None)
            monkeypatch.undo()
        assert calls == [
            f"step(update=True, scale=1.0, max_norm=None{said})", f"evaluate({said.removeprefix(', ')})",
        ]  # fmt: skip


def test_wrong_metrics_of_a_workload():
    """Names are text, and metrics are functions."""
    for metrics, said in (([1], "is a list"), ({1: len}, "has the name 1"), ({"a": 3}, r"\['a'\] is a int")):
        with pytest.raises(UsageError, match=rf"Workload.metrics ?{said}"):
            layers(metrics=metrics)


def test_the_check_finds_a_wrong_metric():
    """Before any training, by its name; a metric with a memory is left as it was, and a sound one passes."""

    class Counting:
        calls = 0

        def __call__(self, *_: Any) -> int:
            self.calls += 1
            return self.calls

    counting, made = Counting(), layers()
    found = check_model(replace(made, metrics={**METRICS, "counting": counting}), graph_of(made))
    assert (found.result, found.cautions, counting.calls) == ("equal", (), 0)
    for bad in ("gave None", "writes into the outputs or the targets"):
        with pytest.raises(UsageError, match=rf"Workload.metrics\['bad'\] {bad}"):
            check_model(replace(made, metrics={"bad": WRONG[bad]}), graph_of(made))
