"""One worker, no launcher: the result is that of the plain model, whatever the plan says about speed and memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from single_rank import be_only_rank
from torch import nn
from workloads import (
    Block,
    Reference,
    diamond,
    language,
    make_plan,
    normalised,
    pipeline_of,
    random_plan,
    sgd,
    skips,
    towers,
    workload,
)

from assigner import Pipeline
from assigner.errors import FormatError, MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.profiler.assembly import workload_reference
from assigner.runtime.ranks.process import settle_vector_maths

if TYPE_CHECKING:
    from pathlib import Path

EXACT = 1e-10


@pytest.mark.parametrize("remat", ["plan", "always", "never"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_ten_steps_equal_the_plain_model(micro_batches, remat):
    """Loss, gradients and weights after ten steps do not depend on micro-batches and rematerialisation."""
    made = language()
    plan = make_plan(made, micro_batches=micro_batches, remat=["blocks.1", "head"])
    reference = Reference(made)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        for n in range(10):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert pipeline.steps == 10


@pytest.mark.slow
@pytest.mark.parametrize("make", [skips, towers], ids=["skips", "branch and dict output"])
def test_other_shapes_of_model_are_exact(make):
    """Skips, branches, several inputs and an output that is a dict change nothing."""
    made = make()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat="always") as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT


@pytest.mark.parametrize("make", [language, skips, towers, diamond])
@pytest.mark.parametrize("seed", range(4))
def test_several_stages_of_one_worker_are_exact(make, seed):
    """Any topological order cut anywhere: loss and weights are the plain model's, also for ragged batches."""
    made = make()
    reference = Reference(made)
    with pipeline_of(made, random_plan(made, seed, workers=1)) as pipeline:
        for n, rows in enumerate((8, 5, 8)):
            batch = made.make_batch(rows, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert reference.gradient_distance(pipeline.gradients()) < EXACT


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 8, 13])
def test_ragged_batches(rows):
    """Rows that the micro-batches do not divide, and fewer rows than micro-batches, count by their share."""
    made = skips()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n in (rows, 8):
            batch = made.make_batch(n, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT


def test_a_summed_loss():
    """With reduction "sum" micro-batches add up in full."""
    made = workload(
        nn.Flatten, "x", loss=lambda o, t: F.mse_loss(o, t, reduction="sum"), reduction="sum", optimizer=sgd
    )
    made = replace(made, model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double(), marks=())
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(7, 1)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.gradient_distance(pipeline.gradients()) < EXACT


@pytest.mark.parametrize(("between", "refused"), [
    (lambda _: None, True),
    (lambda pipeline: pipeline.clip_grad_norm_(1e-3), True),
    (lambda pipeline: pipeline.clip_grad_value_(1e-3), True),
    (lambda pipeline: pipeline.optimizer.zero_grad(), False),
    (lambda pipeline: pipeline.optimizer.zero_grad(set_to_none=False), False),
    (lambda pipeline: pipeline.step(skips().make_batch(8, 0), update=False), False),
    (lambda pipeline: next(iter(pipeline.named_parameters()))[1].grad.mul_(2), False),
])  # fmt: skip
def test_an_update_behind_that_of_a_step(between, refused):
    """It is refused where it would apply the same gradients again: a loop has kept its `optimizer.step()`."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        between(pipeline)
        with pytest.raises(UsageError, match="apply gradients again") if refused else contextlib.nullcontext():
            pipeline.optimizer.step()
        assert pipeline.steps == 2 - refused
        pipeline.step(made.make_batch(8, 1))


def test_accumulation_over_steps():
    """Two steps without an update give the sum of both gradients; `optimizer.step()` applies it once."""
    made = skips()
    reference = Reference(made)
    batches = [made.make_batch(rows, rows) for rows in (8, 6)]
    for batch in batches:
        reference.loss(batch).backward()
    with pipeline_of(made, make_plan(made)) as pipeline:
        for batch in batches:
            pipeline.step(batch, update=False)
        assert pipeline.steps == 0
        assert reference.gradient_distance(pipeline.gradients()) < EXACT
        reference.optimizer.step()
        pipeline.optimizer.step()
        assert reference.distance(pipeline.named_parameters()) < EXACT
        pipeline.optimizer.zero_grad()
        assert pipeline.gradients() == {}
        assert pipeline.step(batches[0]) == pytest.approx(reference.step(batches[0]), abs=EXACT)
        assert reference.gradient_distance(pipeline.gradients()) < EXACT


def test_dropout_is_the_same_under_remat():
    """A recompute draws the masks of the first forward: losses and weights are equal to the last bit.

    Of a weight that two partitions share, the two gradients of a micro-batch are added to each other first, or one by
    one to what is there: the last bit may differ.
    """
    made = language(dropout=0.3, tied=False)
    results = []
    for remat in ("never", "always"):
        with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
            losses = [pipeline.step(made.make_batch(8, n)) for n in range(3)]
            results.append((losses, {name: each.detach().clone() for name, each in pipeline.named_parameters()}))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_dropout_differs_between_accumulated_batches():
    """Each batch has masks of its own, also where no update lies between two of them."""
    made = language(dropout=0.5)
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(8, 0)
        losses = {pipeline.step(batch, update=False) for _ in range(3)}
    assert len(losses) == 3


def test_running_statistics_count_a_micro_batch_once():
    """BatchNorm's buffers after rematerialised steps are those without, and the plain model's for one micro-batch."""
    made = workload(normalised)
    reference = Reference(made)
    with (
        pipeline_of(made, make_plan(made, micro_batches=1), remat="always") as whole,
        pipeline_of(made, make_plan(made, micro_batches=2), remat="always") as again,
        pipeline_of(made, make_plan(made, micro_batches=2), remat="never") as stored,
    ):
        for n in range(3):
            batch = made.make_batch(8, n)
            expected = reference.step(batch)
            assert whole.step(batch) == pytest.approx(expected, abs=EXACT)
            assert again.step(batch) == stored.step(batch)
        assert reference.distance(whole.state_dict().items()) < EXACT
        kept = stored.state_dict()
        assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} < set(kept)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in again.state_dict().items())


class Partly(nn.Module):
    """A frozen first part, an output that nobody reads, a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.two = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 1)
        self.last.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        self.two[0](x)
        return self.last(torch.tanh(self.two[1](x)))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_frozen_unused_and_idle(remat):
    """Frozen weights stay, and neither an unused output nor a parameter without gradient disturbs the step."""
    made = workload(Partly, "frozen", "two.*", "last")
    reference = Reference(made)
    plan = make_plan(made)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        assert not any(edge.gradient for edge in pipeline.graph.edges if edge.source == "frozen")
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert "last.idle" not in pipeline.gradients()
        assert "two.0.weight" not in pipeline.gradients()


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "forwards"), [("never", 4), ("plan", 6), ("always", 8)])
def test_a_recompute_is_one_forward(remat, forwards, monkeypatch):
    """A rematerialised partition runs forward exactly once more for each micro-batch, and no other one does."""
    made = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    linear = Mock(side_effect=nn.Linear.forward)
    with pipeline_of(made, make_plan(made, micro_batches=2, remat=["1"]), remat=remat) as pipeline:
        monkeypatch.setattr(nn.Linear, "forward", functools.partialmethod(linear))
        pipeline.step(made.make_batch(8, 0))
    assert linear.call_count == forwards


def test_vector_maths_are_settled_before_anything_is_computed():
    """MKL's first call of a function by several threads at once may be wrong; a pipeline's first calls are by one."""
    settle_vector_maths.cache_clear()
    made = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    with pipeline_of(made, make_plan(made)):
        assert settle_vector_maths.cache_info().currsize == 1


class Overwriting(nn.Module):
    """Its first operation changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_in_place_first_operation(remat):
    """A partition may change what it reads in place, be it the batch or another partition's output."""
    made = workload(lambda: nn.Sequential(Overwriting(), Overwriting(), nn.Identity(), Overwriting(), nn.Linear(8, 1)))
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
        for n in range(3):
            expected = reference.step(made.make_batch(8, n))
            assert pipeline.step(made.make_batch(8, n)) == pytest.approx(expected, abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT


def test_a_partition_shared_in_the_forward():
    """A marked module that runs twice in a row is one partition."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(torch.tanh(self.one(x))))

    made = workload(Twice, "one", "two")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat="always") as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.gradient_distance(pipeline.gradients()) < EXACT


def test_hooks_run_once():
    """A marked module's hooks run where the model has them, once a forward."""

    def hooked() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        model[0].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        model[0].register_forward_hook(lambda _, __, made: made * 3)
        return model

    made = workload(hooked)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)


def test_the_users_randomness_is_left_alone():
    """Building a pipeline and its steps leave the caller's generator as it was."""
    made = language(dropout=0.3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_names_are_the_models_own():
    """state_dict has the model's names, a shared parameter under its first one."""
    made = language()
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert set(pipeline.state_dict()) == set(made.model().state_dict()) - {"head.weight"}


def test_a_failed_step_keeps_nothing():
    """An error in the loss says where it was, and the step's graphs are gone."""
    alive = []

    def failing(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if alive:
            raise ArithmeticError("no such loss")
        kept = output.exp()  # its backward keeps it
        alive.append(weakref.ref(kept))
        return kept.sum()

    made = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), loss=failing)
    pipeline = pipeline_of(made, make_plan(made))
    with pytest.raises(ArithmeticError, match="no such loss") as caught:
        pipeline.step(made.make_batch(8, 0))
    assert "the loss, micro-batch 1 on worker:0/cpu" in caught.value.__notes__[0]
    del caught
    gc.collect()
    assert alive[0]() is None
    pipeline.close()


def test_the_only_rank_of_a_run_goes_on_behind_a_batch_that_it_leaves_out(monkeypatch):
    """A launcher or none: the script catches the error. Once the pipeline is closed it says so."""
    be_only_rank(monkeypatch)
    made = workload(
        lambda: nn.Sequential(nn.Linear(8, 1)), loss=lambda output, target: F.mse_loss(output, checked(target))
    )
    reference = Reference(made)
    inputs, targets = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert dist.get_world_size() == 1
        with pytest.raises(ValueError, match="bad targets"):
            pipeline.step((inputs, targets.index_fill(0, torch.tensor(7), math.nan)))
        assert pipeline.step((inputs, targets)) == pytest.approx(reference.step((inputs, targets)), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
    with pytest.raises(UsageError, match="left its run: it was closed"):
        pipeline.step((inputs, targets))


def checked(target: torch.Tensor) -> torch.Tensor:
    if target.isnan().any():
        raise ValueError("bad targets")
    return target


def test_closing_twice_is_harmless():
    """A pipeline on one worker starts no threads, and can be closed twice."""
    made = skips()
    before = threading.active_count()
    pipeline = pipeline_of(made, make_plan(made))
    assert threading.active_count() == before
    pipeline.close()
    pipeline.close()


@pytest.mark.long
def test_a_plan_for_another_model():
    """The error names what differs, before anything is built."""
    plan = make_plan(skips())
    with pytest.raises(FormatError, match=r"workload 'test'.*another one: no partition is marked"):
        Pipeline(workload(Block), plan)
    with pytest.raises(FormatError, match=r"partition 'blocks\.0' is in only one of the two"):
        Pipeline(language(), plan)
    wider = workload(lambda: nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 1)))
    narrow = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    with pytest.raises(FormatError, match="shapes, edges, autocast or a setting"):
        Pipeline(wider, make_plan(narrow))


def test_a_forward_that_fails_is_no_other_model(monkeypatch):
    """What it raises between the partitions is told as such, where the model has all that the plan names."""
    made = skips()
    plan = make_plan(made)
    plan = replace(plan, workload=workload_reference(made, partition_graph(made), ""))
    monkeypatch.setattr(type(made.model()), "forward", forgetful)
    with pytest.raises(MarkingError, match=r"cannot be traced at .*\(raise RuntimeError.*: no such day"):
        Pipeline(made, plan)


def forgetful(_self: nn.Module, *_inputs: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such day")


@pytest.mark.long
def test_a_plan_for_other_inputs():
    """They are told apart from another model, also where the model cannot take them; plans of old say less."""
    made = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    plan = make_plan(made)
    noted = replace(plan, workload=workload_reference(made, partition_graph(made), ""))
    assert noted.workload.inputs == "float64[4, 8]"
    changed = replace(made, batch=lambda rows, _: (torch.zeros(rows, 9).double(), torch.zeros(rows, 1)))
    with pytest.raises(
        FormatError, match=r"with other inputs: .* had \(float64\[4, 8\]\), .* gives \(float64\[4, 9\]\)"
    ):
        Pipeline(changed, noted)
    of_another = replace(noted, workload=replace(noted.workload, name="speech"))
    with pytest.raises(FormatError, match="with other inputs") as caught:
        Pipeline(changed, of_another)
    assert "for workload 'speech', and this workload is 'test' with other inputs" in str(caught.value)
    assert caught.value.hint == "give a plan that was solved for it"
    with pytest.raises(FormatError, match="another one"):
        Pipeline(changed, plan)
    Pipeline(made, noted).close()


def test_a_world_too_small():
    """A plan for two ranks in a process without a launcher is a usage error that says how to start it."""
    made = skips()
    names = [piece.name for piece in pipeline_of(made, make_plan(made)).graph.pieces]
    plan = make_plan(made, [(0, names[:2]), (1, names[2:])])
    with pytest.raises(UsageError, match="needs 2 ranks") as caught:
        pipeline_of(made, plan)
    assert caught.value.exit_code == 2
    assert "torchrun" in caught.value.hint


def test_bad_batches():
    """A batch without rows, and a loss that is no number, are refused in words."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        x, y = made.make_batch(8, 0)
        with pytest.raises(UsageError, match="the batch is empty: its inputs have 0 rows"):
            pipeline.step((x[:0], y[:0]))
    pipeline = pipeline_of(replace(made, loss=lambda output, _: output), make_plan(made))
    with pytest.raises(UsageError, match=r"loss gave a tensor of shape \(2, 1\)"):
        pipeline.step((x, y))


def test_a_plan_from_a_file(tmp_path: Path):
    """A path is read as a plan."""
    from assigner import save_plan

    made = skips()
    save_plan(make_plan(made), tmp_path / "plan.json")
    with Pipeline(made, tmp_path / "plan.json") as pipeline:
        assert pipeline.step(made.make_batch(8, 0)) > 0
