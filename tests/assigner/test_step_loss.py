"""The loss of a step: called once for each micro-batch, or once over the batch, where it then equals the plain one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from changing_models import micro_batched
from loss_cases import NAMES, differences, mixing, rare_differences
from torch import nn
from workloads import WIDTH, Language, Reference, make_plan, numbers, pipeline_of, sgd, tokens, workload

from assigner.errors import AssignerError, UsageError
from assigner.model.workload import Workload


class Remembering:
    """A loss that is scaled by a running mean of what it was before, and knows what it was called with."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.ones((), dtype=torch.float64), []

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.append(targets[0].item())
        loss = F.mse_loss(outputs, targets)
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return loss / self.mean


def layers(loss: Any, **options: Any) -> Workload:
    model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))  # noqa: E731
    return replace(workload(model, loss=loss), **options)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize(("micro_batches", "schedule"), [(1, "gpipe"), (3, "gpipe"), (4, "gpipe"), (4, "1f1b")])
def test_a_loss_is_called_once_for_each_micro_batch(micro_batches, schedule, remat):
    """One with a memory in the order of the micro-batches, whether or not the last partition runs again."""
    loss = Remembering()
    made = layers(loss)
    plan = make_plan(made, micro_batches=micro_batches, schedule=schedule)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        for n in range(2):
            batch = made.make_batch(8, n)
            loss.seen.clear()
            pipeline.step(batch)
            firsts = [part[0].item() for part in batch[1].tensor_split(micro_batches)]
            assert loss.seen == firsts


@pytest.mark.slow
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_what_a_loss_draws_is_the_same_under_every_plan(draw):
    """From Python's generator and NumPy's, whatever these hold: as torch's draws are. The script's own go on."""
    made = layers(lambda outputs, targets: F.mse_loss(outputs, targets) * (1 + draw()))
    found = []
    for seed, stages, remat in ((1, [(0, ["0", "1"])], "never"), (2, [(0, ["0"]), (0, ["1"])], "always")):
        random.seed(seed)
        np.random.seed(seed)
        with pipeline_of(made, make_plan(made, stages, schedule="interleaved"), remat=remat) as pipeline:
            found.append([pipeline.step(made.make_batch(8, n)) for n in range(3)])
        drawn = random.random(), np.random.rand()
        random.seed(seed)
        np.random.seed(seed)
        assert drawn == (random.random(), np.random.rand())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert len(set(found[0])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_loss_with_a_memory_is_the_plain_one(remat):
    """Of one micro-batch: the running mean moves once a step, and an evaluation moves it once."""
    plain, piped = Remembering(), Remembering()
    reference = Reference(layers(plain))
    made = layers(piped)
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), abs=1e-12)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12


class InPlace(nn.Module):
    """A loss that moves its running mean in place and divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = (outputs - targets).square()
        self.mean.mul_(0.9).add_(losses.detach().mean(), alpha=0.1)
        return (losses / self.mean).mean()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_memory_that_is_written_in_place(schedule, remat):
    """Each micro-batch's backward reads it as its own loss left it."""
    plain, piped = InPlace(), InPlace()
    reference, made = Reference(layers(plain)), layers(piped)
    with pipeline_of(made, replace(make_plan(made, micro_batches=3), schedule=schedule), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(9, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 3), abs=1e-12)
            assert reference.gradient_distance(pipeline.gradients()) < 1e-12
        assert piped.mean.item() == pytest.approx(plain.mean.item(), abs=1e-12)


class Beginning(Remembering):
    """A loss whose memory first moves when it sees so many rows."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin = begin

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.shape[0] < self.begin:  # a count of calls would be a memory itself
            return F.mse_loss(outputs, targets)
        return super().__call__(outputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_memory_that_begins_late(schedule, remat):
    """It is the plain one where losses come in order, then and later; a step that had them in another is refused."""
    plain, piped = Beginning(6), Beginning(6)
    reference, made = Reference(layers(plain)), layers(piped)
    plan = replace(make_plan(made, micro_batches=2), schedule=schedule)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 2), abs=1e-12)
        batch = made.make_batch(12, 1)
        if schedule == "gpipe" and remat != "never":
            with pytest.raises(UsageError, match=r"begins to keep something .* micro-batches 1, 0 in"):
                pipeline.step(batch)
            return
        for n in range(2, 5):
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 2), abs=1e-12)
            batch = made.make_batch(12, n)
        assert piped.seen == plain.seen


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_over_the_batch_is_the_plain_one(name, micro_batches, remat):
    """Losses, gradients and weights to 1e-9, with full and ragged batches."""
    found = differences(name, (0, 0), micro_batches=micro_batches, remat=remat)
    assert all(each < 1e-9 for each in found.values()), found


def test_a_loss_over_parts_is_another_one():
    """Without the option a loss that mixes rows is not the plain one: the case would show a difference."""
    made = replace(mixing("tuple"), loss_over="micro_batch")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        batch = made.make_batch(8, 0)
        assert abs(pipeline.step(batch) - reference.step(batch)) > 1e-3


class Criterion(nn.Module):
    """A loss over the batch with a parameter of its own, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones((), dtype=torch.float64)), 0

    def forward(self, outputs: torch.Tensor, targets: list[float]) -> torch.Tensor:
        self.calls += 1
        centred = outputs - outputs.mean(0)
        return (centred[:, 0] - self.scale * torch.tensor(targets, dtype=torch.float64)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_it_sees_all_targets_and_is_called_once(remat):
    """Targets stay whole in any form, accumulated steps add up scaled, and a loss's own parameter gets its gradient."""
    criterion, other = Criterion(), Criterion()

    def batch(rows: int, generator: torch.Generator) -> Any:
        x, y = numbers(rows, generator)
        return x, y[:, 0].tolist()

    made = layers(criterion, batch=batch, loss_over="batch")
    reference = Reference(replace(made, loss=other))
    with pipeline_of(made, make_plan(made, micro_batches=3), remat=remat) as pipeline:
        for n in range(2):
            given = made.make_batch(8, n)
            pipeline.step(given, update=False, scale=0.5)
            (reference.loss(given) * 0.5).backward()
        assert criterion.calls == other.calls == 2
        assert reference.gradient_distance(pipeline.gradients()) < 1e-12
        assert torch.allclose(criterion.scale.grad, other.scale.grad)


def test_small_gradients_of_a_scaled_loss_do_not_vanish():
    """The scale is in the loss's gradient from its start, and out of the parameters' again."""
    made = layers(lambda outputs, _: 1e-6 * (outputs - outputs.mean()).square().mean(), loss_over="batch")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**20)) as pipeline:
        batch = made.make_batch(8, 0)
        pipeline.step(batch)
        reference.step(batch)
        assert reference.gradient_distance(pipeline.gradients()) < 1e-15


class Whole(nn.Module):
    """Returns something beside its rows."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.a, self.trained = nn.Linear(WIDTH, 1), trained
        self.register_buffer("table", torch.arange(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.a(x)
        return made, made.square().mean() if self.trained else self.table


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_outputs_without_rows(remat):
    """One that is trained is refused in words; one that is the same for all micro-batches goes to the loss as it is."""
    for trained in (True, False):
        made = Workload(
            lambda trained=trained: Whole(trained=trained).double(), numbers,
            lambda outputs, targets: F.mse_loss(outputs[0] - outputs[0].mean(), targets) + outputs[1].double().sum(),
            sgd, 8, marks=("a",), loss_over="batch", name=f"whole {trained}",
        )  # fmt: skip
        batch = made.make_batch(8, 0)
        if trained:
            pipeline = pipeline_of(made, make_plan(made), remat=remat)
            with pipeline, pytest.raises(UsageError, match=r"output of shape \(\) has no rows"):
                pipeline.step(batch)
        else:
            with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
                assert pipeline.step(batch) == pytest.approx(Reference(made).step(batch), abs=1e-12)


class NotAlone(nn.Module):
    """Refuses a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("a row has no other to be compared with")
        return self.a(x)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (layers(F.mse_loss, loss_over="batch"), "whole batch, which was cut into micro-batches of 2, 2, 1 rows"),
        (workload(NotAlone, "a"), "no other .* of a batch that was cut into 2, 2, 1"),
    ],
    ids=["the loss", "the model"],
)
def test_a_micro_batch_of_one_row_is_told_as_such(made, words):
    """It is the cut that has made it, and not what the batch or the model is."""
    made = replace(made, batch_size=3)
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    with pipeline, pytest.raises(AssignerError, match=words) as caught:
        pipeline.step(made.make_batch(5, 0))
    assert "Workload.min_rows=2" in str(caught.value.hint)


class NotAloneHere(nn.Linear):
    """Likewise, where a partition runs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("a row has no other to be compared with")
        return super().forward(x)


def test_the_note_of_an_error_tells_of_one_row():
    """The error is the model's own; that the cut has made a micro-batch of one row stands beside it."""
    made = replace(workload(lambda: nn.Sequential(NotAloneHere(WIDTH, 1))), batch_size=3)
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    with pipeline, pytest.raises(ValueError, match="no other") as caught:
        pipeline.step(made.make_batch(5, 0))
    assert "of one row (Workload.min_rows=2 allows none) on worker:0/cpu" in caught.value.__notes__[0]


class Forked(nn.Module):
    """Another path for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu() if x.shape[0] > 2 else self.a(x))


@pytest.mark.long
def test_what_cannot_have_the_whole_batch_is_refused():
    """A schedule whose backwards come too early, micro-batches of several graphs, and options without a meaning."""
    made = layers(F.mse_loss, loss_over="batch")
    early = make_plan(made, [(0, ["0"]), (1, ["1"])], schedule="1f1b")
    with pytest.raises(UsageError, match="under schedule 1f1b the last stage's backwards begin") as caught:
        pipeline_of(made, early)
    assert "--schedule gpipe" in (caught.value.hint or "")
    with pipeline_of(made, make_plan(made)) as pipeline, pytest.raises(UsageError, match="under schedule 1f1b"):
        pipeline.move(make_plan(made, schedule="1f1b"))
    forked = replace(workload(Forked, "*"), loss_over="batch")
    for call in ("step", "evaluate"):
        pipeline = pipeline_of(forked, make_plan(forked, micro_batches=2))
        with pipeline, pytest.raises(UsageError, match=r"another path for some .* \(their rows: \[3\] and \[2\]\)"):
            getattr(pipeline, call)(forked.make_batch(5, 0))
    with pytest.raises(UsageError, match="loss_over: 'row' is not allowed"):
        replace(made, loss_over="row")
    with pytest.raises(UsageError, match="weight has no meaning with loss_over 'batch'"):
        replace(made, weight=lambda *_: 1.0)


def test_a_loss_that_is_no_number_is_told():
    """Its shape or type, over the batch as over a micro-batch."""
    for over in ("batch", "micro_batch"):
        made = layers(lambda outputs, _: outputs.mean(0), loss_over=over)
        pipeline = pipeline_of(made, make_plan(made))
        with pipeline, pytest.raises(UsageError, match=r"Workload.loss gave a tensor of shape \(1,\)"):
            pipeline.step(made.make_batch(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remat": "always"}, {"scaler": torch.amp.GradScaler("cpu")}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_loss_that_is_a_constant_for_some_micro_batches(schedule, options):
    """It counts with its value, and its backward adds nothing."""
    found = rare_differences([(0, ["parts.0", "parts.1", "parts.2", "last"])], schedule, **options)
    assert max(found.values()) < 1e-10


def test_a_micro_batch_that_weighs_nothing_has_no_gradients():
    """None of zeros either, with which weights that the loss does not read would decay."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.read, self.unread = (nn.Linear(WIDTH, n) for n in (WIDTH, 1, 1))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.body(x)
            return self.read(x), self.unread(x)

    made = workload(Two, "*", loss=lambda outputs, targets: F.mse_loss(outputs[0], targets))
    made = replace(made, weight=lambda _, targets: float((targets > 0).sum()))
    x, targets = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        pipeline.step((x, targets.abs() * torch.tensor([[1.0]] * 6 + [[-1.0]] * 2)))
        assert {name for name, each in pipeline.named_parameters() if each.grad is None} == {
            "unread.weight", "unread.bias",
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(off):
    """A step under no_grad would train nothing, as the plain loop's backward would tell."""
    made = layers(F.mse_loss)
    pipeline = pipeline_of(made, make_plan(made))
    with pipeline, off(), pytest.raises(UsageError, match="it would train nothing"):
        pipeline.step(made.make_batch(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_that_writes_into_its_targets(schedule, remat):
    """As `labels[labels == padding] = -100` does: each call has its own, and the script's batch stays as it is."""

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets[targets == 0] = -100
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / 40

    made = workload(Language, "tokens", "blocks.*", "head", batch=tokens, loss=loss, reduction="sum")
    reference = Reference(made)
    ids, targets = made.make_batch(8, 0)
    given = targets.clone()
    with pipeline_of(made, make_plan(made, micro_batches=4, schedule=schedule), remat=remat) as pipeline:
        for _ in range(3):
            assert pipeline.step((ids, targets)) == pytest.approx(reference.step((ids, given.clone())), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-10
    assert torch.equal(targets, given)


@pytest.mark.parametrize(("last", "remat"), [(nn.Flatten, "never"), (nn.Identity, "always")])
def test_a_loss_that_writes_to_outputs_which_the_last_partition_only_hands_on(last, remat):
    """It has its own: the partition before goes on as if nobody had written."""
    made = workload(
        lambda: nn.Sequential(nn.Linear(WIDTH, 1), last()), "0", "1", loss=lambda y, t: F.mse_loss(y.mul_(0.5), t)
    )
    reference, batch = Reference(made), made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat) as pipeline:
        assert float(pipeline.evaluate(batch)) == pytest.approx(reference.loss(batch).item(), abs=1e-12)
        for _ in range(3):
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-12)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_module_of_torchs_with_a_hook_is_a_loss_of_the_users(remat):
    """What it draws is the same in each run, and what it writes stays in its call."""
    loss = nn.MSELoss()
    loss.register_forward_pre_hook(lambda _, given: (given[0], given[1].mul_(2)))
    loss.register_forward_hook(lambda *given: given[-1] * (1 + random.random()))
    made, found = layers(loss), []
    batch, before = made.make_batch(8, 0), made.make_batch(8, 0)
    for _ in range(2):
        with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat) as pipeline:
            found.append(pipeline.step(batch))
    assert found[0] == found[1]
    assert torch.equal(batch[1], before[1])


CALLS: list[Any] = []
"""What `calling` calls once, if anything."""


def calling(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    factor = CALLS.pop()() if CALLS else 1.0
    return F.mse_loss(outputs, targets) * float(factor)


def test_a_loss_that_calls_its_own_pipeline():
    """It is refused on the only rank too, where the values of one batch would take the place of the other's."""
    made = layers(calling)
    batch, other = made.make_batch(8, 0), made.make_batch(5, 1)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        plain = pipeline.evaluate(batch)
        for outer in (pipeline.step, pipeline.evaluate):
            for inner in (pipeline.step, pipeline.evaluate, pipeline.forward):
                CALLS[:] = [lambda call=inner: call(other[0] if call == pipeline.forward else other)]
                with pytest.raises(UsageError, match="calls its own pipeline in the middle of a batch"):
                    outer(batch)
                assert pipeline.evaluate(batch) == plain
