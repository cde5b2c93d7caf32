"""Running statistics under a pipeline are those of the whole batch, and nothing else of BatchNorm changes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from sweeps import sweep
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import WIDTH, Reference, make_plan, normalised, numbers, pipeline_of, workload

from assigner import Pipeline, Workload
from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.runtime.step.batchnorm import DeferredNorm, DeferredStatistics, PartitionNorms

EXACT = 1e-10


def first(**options: Any) -> Workload:
    """A model whose first layer, partition 0, is a BatchNorm."""
    return workload(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH, **options), nn.Linear(WIDTH, 1)), rows=12)


def statistics(named: Any) -> dict[str, torch.Tensor]:
    """Buffers by name."""
    return {name: each.clone() for name, each in named if "running" in name or "tracked" in name}


def assert_plain(made: Workload, reference: Reference, pipeline: Pipeline, rows: tuple[int, ...]) -> None:
    """Some steps move the buffers as the plain model's."""
    for n, count in enumerate(rows):
        batch = made.make_batch(count, n)
        pipeline.step(batch, update=False)
        reference.model.zero_grad()
        reference.loss(batch).backward()
    assert statistics(pipeline.state_dict().items())
    assert reference.distance(statistics(pipeline.state_dict().items()).items()) < EXACT


class Sharing(nn.Module):
    """Two BatchNorms, the second of which has some of the first one's running statistics."""

    def __init__(self, shared: str, momentum: float | None, *, second_first: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.BatchNorm1d(WIDTH, momentum=momentum, dtype=torch.float64) for _ in range(2))
        self.between, self.second_first = nn.Linear(WIDTH, WIDTH), second_first
        for name in shared.split():
            of_one = getattr(self.one, name)
            setattr(self.two, name, of_one.view(-1) if name == "running_var" else of_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = (self.two, self.one) if self.second_first else (self.one, self.two)
        return self.between(calls[0](x)) + calls[1](2 * x - 1)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("shared", "momentum", "second_first"),
    [
        ("running_mean running_var num_batches_tracked", 0.3, True),
        ("running_mean running_var num_batches_tracked", 0.3, False),
        ("running_var", 0.3, False),
        ("num_batches_tracked", None, True),
        ("running_mean", 0.3, True),
    ],
)
def test_statistics_that_two_modules_share(shared, momentum, second_first, micro_batches):
    """They move for one module after the other, in the order of the calls, whichever of the values are shared."""
    made = workload(
        lambda: nn.Sequential(Sharing(shared, momentum, second_first=second_first), nn.Linear(WIDTH, 1)), rows=12
    )
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        reference = Reference(made)
        for n, rows in enumerate((12, 12, 10)):
            batch = made.make_batch(rows, n)
            pipeline.step(batch, update=False)
            reference.loss(batch)
        mine, theirs = pipeline.state_dict(), reference.model.state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[name], theirs[name], rtol=EXACT, atol=EXACT) for name in mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_batches", "remat", "momentum"), [(1, "always", 0.1), (3, "never", 0.7), (6, "except_last", None)]
)
def test_they_are_the_plain_models(micro_batches, remat, momentum):
    """Of a first layer to 1e-10, whatever the micro-batches, uneven ones too; a recompute does not count again."""
    made = first(momentum=momentum)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10, 12, 8))


class Checkpointed(nn.Module):
    """A checkpoint runs its BatchNorm again in the backward, some calls after others."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.norm, self.inner, self.calls = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), calls

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each call is of what the partition is given."""
        return sum(checkpoint(self.work, x * n + n, use_reentrant=False) for n in range(1, self.calls + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_batches", "remat", "calls"), [(1, "always", 1), (3, "never", 1), (3, "always", 2), (4, "except_last", 2)]
)
def test_a_checkpoint_moves_them_once_more(micro_batches, remat, calls):
    """As in the plain model, whose recompute in the backward moves them again; in another order than the forward."""
    made = workload(lambda: nn.Sequential(Checkpointed(calls), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10, 12))


class Ending(nn.Module):
    """A checkpoint that ends with its BatchNorm: torch runs it again as far as it must, into the norm's forward."""

    def __init__(self, kind: type[nn.BatchNorm1d]) -> None:
        super().__init__()
        self.norm, self.scale = kind(WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, x * self.scale, use_reentrant=False)


class Doubling(nn.BatchNorm1d):
    """With a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Doubling])
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, "always"), (3, "never")])
def test_a_checkpoint_that_ends_in_one_moves_it_once_more(kind, micro_batches, remat):
    """As in the plain model."""
    made = workload(lambda: nn.Sequential(Ending(kind), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10, 12))


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, "never"), (1, "always"), (2, "never")])
def test_a_checkpoint_that_moves_them_for_each_micro_batch(micro_batches, remat):
    """One micro-batch that keeps its graph is as in the plain model; else its backward's changes would be lost."""
    made = workload(lambda: nn.Sequential(Checkpointed(1), nn.Linear(WIDTH, 1)), rows=12)
    plan = make_plan(made, micro_batches=micro_batches)
    with pipeline_of(made, plan, remat=remat, batch_norm="micro_batch") as pipeline:
        if (micro_batches, remat) == (1, "never"):
            assert_plain(made, Reference(made), pipeline, (12, 10, 12))
            return
        with pytest.raises(UsageError, match="a checkpoint's recompute, as of a BatchNorm"):
            pipeline.step(made.make_batch(12, 0))


class Steers(nn.Module):
    """Calls its BatchNorm with one momentum and with another, or with more from call to call."""

    def __init__(self, *, grows: bool = False) -> None:
        super().__init__()
        self.norm, self.grows, self.calls = nn.BatchNorm1d(WIDTH), grows, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice."""
        self.calls += 1
        self.norm.momentum = self.calls / 100 if self.grows else 0.5
        x = self.norm(x)
        self.norm.momentum = 0.0
        x = self.norm(2 * x + 1)
        self.norm.momentum = 0.1
        return x


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_momentum_is_that_of_the_call(remat):
    """Whatever it is when the step ends, each call has moved the running values by its own."""
    made = workload(lambda: nn.Sequential(Steers(), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10))


def test_one_momentum_for_all_micro_batches():
    """The whole batch moves the running values once: more than one is refused."""
    made = workload(lambda: nn.Sequential(Steers(grows=True), nn.Linear(WIDTH, 1)), rows=12)
    with (
        pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline,
        pytest.raises(
            UsageError, match=r"BatchNorm1d, whose momentum is 0\.01 in one micro-batch and 0\.02 in another"
        ),
    ):
        pipeline.step(made.make_batch(12, 0))


def test_accumulated_steps_count_each():
    """A step is one batch to BatchNorm, whether or not an update follows it."""
    made = first()
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        for n in range(4):
            pipeline.step(made.make_batch(12, n), update=n % 2 == 1)
        assert int(pipeline.state_dict()["0.num_batches_tracked"]) == 4


class Untracked(nn.Module):
    """Its second look at the batch does not count, as in virtual adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm(x)
        self.norm.track_running_stats = False
        seen = seen + self.norm(2 * x + 1)
        self.norm.track_running_stats = True
        return seen


def test_a_call_that_does_not_track():
    """Where a forward turns tracking off for a call, that call moves nothing."""
    made = workload(lambda: nn.Sequential(Untracked(), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=3), remat="always") as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 12))


class Deep(nn.Module):
    """BatchNorms of every kind inside one marked module: one is called twice, one is frozen, two track nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.BatchNorm1d(WIDTH, affine=False)
        self.inner = nn.Sequential(nn.Sequential(nn.Identity(), nn.BatchNorm2d(4), nn.BatchNorm3d(2)))
        self.free = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(WIDTH).eval()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flat(x) + self.flat(2 * x.detach() + 1)
        made = self.inner[0][1](x.detach().unflatten(1, (4, 2, 1)))
        made = made + self.inner[0][2](x.detach().unflatten(1, (2, 4, 1, 1))).reshape(made.shape)
        return self.linear(self.frozen(self.free(made.flatten(1)))) + x


def test_every_kind_at_any_depth():
    """Two calls in a forward move the running values twice; what tracks nothing or is frozen stays as it is."""
    made = workload(lambda: nn.Sequential(Deep(), nn.Linear(WIDTH, 1)), rows=12)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=3), remat="always") as pipeline:
        for n in range(2):
            batch = made.make_batch(12, n)
            pipeline.step(batch, update=False)
            reference.loss(batch)
        mine, plain = pipeline.state_dict(), dict(reference.model.named_buffers())
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.allclose(mine[f"0.flat.{name}"], plain[f"0.flat.{name}"], atol=EXACT, rtol=0)
        assert int(mine["0.flat.num_batches_tracked"]) == 4
        assert int(mine["0.inner.0.1.num_batches_tracked"]) == int(mine["0.inner.0.2.num_batches_tracked"]) == 2
        assert int(mine["0.frozen.num_batches_tracked"]) == 0
        assert torch.equal(mine["0.frozen.running_mean"], torch.zeros(WIDTH, dtype=torch.float64))
        assert not any(name.startswith("0.free.running") for name in mine)


def test_one_forward_of_a_large_batch():
    """BatchNorm2d and 3d count every place of an image, and unbiased variances divide by all of them less one."""
    for norm, shape in ((nn.BatchNorm2d(3), (7, 3, 4, 5)), (nn.BatchNorm3d(3), (7, 3, 2, 2, 3))):
        plain, copied = norm.double(), copy.deepcopy(norm)
        x = torch.randn(shape, dtype=torch.float64)
        plain(x)
        deferred = DeferredStatistics({"part": nn.Sequential(copied)}, "deferred")
        for n, rows in enumerate(x.split(3)):
            deferred.partitions["part"].begin(n)
            copied(rows)
        assert int(copied.num_batches_tracked) == 0
        deferred.commit()
        for name, buffer in plain.named_buffers():
            assert torch.allclose(copied.get_buffer(name).double(), buffer.double(), atol=EXACT, rtol=0), name


def test_switched_off_it_is_plain_batch_norm_for_each_micro_batch():
    """With "micro_batch" every micro-batch moves the running values, as in a plain loop over them."""
    made = first()
    model = made.model()
    with pipeline_of(made, make_plan(made, micro_batches=3), batch_norm="micro_batch", remat="always") as pipeline:
        for n in range(2):
            batch = made.make_batch(12, n)
            pipeline.step(batch)
            for rows in batch[0].split(4):
                model[0](rows)
        for name, buffer in model[0].named_buffers():
            assert torch.allclose(pipeline.state_dict()[f"0.{name}"].double(), buffer.double(), atol=EXACT, rtol=0)


def test_the_loss_is_that_of_micro_batches():
    """Only running values are deferred: losses and weights are those that "micro_batch" gives."""
    made = workload(normalised)
    found = []
    for choice in ("deferred", "micro_batch"):
        with pipeline_of(made, make_plan(made, micro_batches=2), batch_norm=choice, remat="always") as pipeline:
            losses = [pipeline.step(made.make_batch(8, n)) for n in range(3)]
            found.append((losses, {name: each.detach().clone() for name, each in pipeline.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(each, found[1][1][name]) for name, each in found[0][1].items())


def test_a_failed_step_leaves_them():
    """A step that raises moves nothing, and the next one starts anew."""
    calls: list[int] = []

    def failing(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("no such loss")
        return F.mse_loss(output, targets)

    made = replace(first(), loss=failing)
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        before = statistics(pipeline.state_dict().items())
        with pytest.raises(ArithmeticError):
            pipeline.step(made.make_batch(12, 0))
        after = statistics(pipeline.state_dict().items())
        assert all(torch.equal(before[name], after[name]) for name in before)
        calls[:] = [1, 1]
        assert_plain(made, Reference(made), pipeline, (12, 12))


class Guarded(nn.BatchNorm1d):
    """Refuses what it has made, behind torch's forward, which has left the figures of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        if not made.isfinite().all():
            raise ValueError("values are not finite")
        return made


def test_a_forward_that_raises_behind_the_figures_leaves_them():
    """Infinities that no good forward has counted reach neither the next step nor other workers."""
    made = workload(lambda: nn.Sequential(Guarded(WIDTH, dtype=torch.float64), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        reference = Reference(made)
        assert_plain(made, reference, pipeline, (12,))
        before = statistics(pipeline.state_dict().items())
        inputs, targets = made.make_batch(12, 1)
        inputs[5] = float("inf")
        with pytest.raises(ValueError, match="not finite"):
            pipeline.step((inputs, targets), update=False)
        after = statistics(pipeline.state_dict().items())
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert_plain(made, reference, pipeline, (12,))


def test_workers_are_given_no_figures_that_nobody_has_counted():
    """What a forward that has raised has left is no part of the sum over workers."""
    module = Guarded(WIDTH)
    norm = DeferredNorm(module, "norm", PartitionNorms("part", {}, itertools.count()), itertools.count())
    norm.begin(0)
    module(torch.randn(4, WIDTH))
    norm.begin(1)
    with pytest.raises(ValueError, match="not finite"):
        module(torch.full((4, WIDTH), float("inf")))
    counted, left = norm.packed(2)
    assert counted.isfinite().all()
    assert counted[0] == 4
    assert not left.any()


@pytest.mark.long
def test_nothing_is_left_in_the_model():
    """The user's module objects, names, kinds and the fingerprint are what they were."""
    kept: list[nn.Module] = []

    def build() -> nn.Module:
        kept.append(normalised())
        return kept[-1]

    made = workload(build)
    graph = partition_graph(made)
    with Pipeline(made, make_plan(made), graph=graph) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        names = set(pipeline.state_dict())
    assert names == set(normalised().state_dict())
    for model in (*kept, graph.deferred.model):
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert all(module.momentum == 0.1 for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert partition_graph(made).fingerprint == graph.fingerprint


class ReadsBefore(nn.Module):
    """Takes off the running mean as it was in front of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norm.running_mean * 2
        return self.last(self.norm(x) - before)


def test_running_statistics_that_are_read_in_front_of_their_module():
    """Each micro-batch reads what the one before it has left; they are refused where they are the whole batch's."""
    made = workload(ReadsBefore, "*")
    reference, plan = Reference(made), make_plan(made, micro_batches=1)
    with pipeline_of(made, plan, batch_norm="micro_batch") as pipeline:
        for batch in (made.make_batch(8, 0), made.make_batch(8, 1)):
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
    with pipeline_of(made, plan) as pipeline, pytest.raises(UsageError, match="uses the running statistics of norm"):
        pipeline.step(made.make_batch(8, 0))


class Adapting(nn.Module):
    """Its eval() leaves its BatchNorm training: it normalises by the batch at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def train(self, mode: bool = True) -> Adapting:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


@pytest.mark.long
@pytest.mark.parametrize("choice", ["deferred", "micro_batch"])
def test_inference_records_nothing(choice):
    """Such a BatchNorm uses each micro-batch's own figures, as torch does, and no evaluation moves its statistics."""
    made = workload(Adapting, "*", rows=12)
    model = made.model()
    with pipeline_of(made, make_plan(made, micro_batches=3), batch_norm=choice) as pipeline:
        model.load_state_dict(pipeline.state_dict())
        x, y = made.make_batch(12, 0)
        expected = torch.cat([model(rows) for rows in x.split(4)]).detach()
        before = statistics(pipeline.state_dict().items())
        assert torch.allclose(pipeline.forward(x), expected, atol=EXACT, rtol=0)
        for _ in range(2):
            assert pipeline.evaluate((x, y)) == pytest.approx(float(F.mse_loss(expected, y)), abs=EXACT)
        after = statistics(pipeline.state_dict().items())
        assert all(torch.equal(before[name], each) for name, each in after.items())
        if choice == "deferred":
            assert_plain(made, Reference(made), pipeline, (12, 9))


class Activated(nn.BatchNorm1d):
    """A user's BatchNorm with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


class ChannelsLast(nn.BatchNorm1d):
    """One of (rows, steps, channels), here of two channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unflatten(1, (-1, 2)).mT).mT.flatten(1)


class Masked(nn.BatchNorm1d):
    """One of the rows that are kept, whose forward takes more than torch's; with none of them it is left out."""

    def forward(self, x: torch.Tensor, shift: float, *, keep: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(keep[:, None], super().forward(x[keep])) + shift if keep.any() else x


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Masked(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, 0.5, keep=x[:, 0] > 0)


def ranked(rows: int, generator: torch.Generator) -> Any:
    """Numbers, of which the first feature is positive in the first five rows."""
    x, y = numbers(rows, generator)
    x[:, 0] = 5 - torch.arange(rows)
    return x, y


@pytest.mark.parametrize(
    "kind",
    [lambda: Activated(WIDTH), lambda: ChannelsLast(2), WithMask],
    ids=["activated", "channels last", "masked"],
)
def test_a_subclass(kind):
    """A class that overrides forward keeps it; its statistics are deferred alike, of what it hands to torch's."""
    made = workload(lambda: nn.Sequential(kind(), nn.Linear(WIDTH, 1)), batch=ranked, rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 9))


class Timm(nn.BatchNorm1d):
    """torch's forward pasted, with an activation that is a module, as libraries of vision models have it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.drop, self.act = nn.Dropout(0.2), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        held = (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None, None)
        normal = F.batch_norm(x, *held, self.weight, self.bias, self.training, share, self.eps)
        return self.act(self.drop(normal))


@pytest.mark.long
def test_a_pasted_forward_that_draws():
    """It is tried out in every step, without a trace: its draws are those of a recompute, and its values torch's."""
    made = workload(lambda: nn.Sequential(Timm(WIDTH), nn.Linear(WIDTH, 1)), rows=12)
    found = []
    for remat in ("never", "always"):
        with pipeline_of(made, make_plan(made, micro_batches=3), remat=remat) as pipeline:
            assert_plain(made, Reference(made), pipeline, (12, 10, 12, 8))
            found.append(pipeline.step(made.make_batch(12, 9)))
    assert found[0] == found[1]


class Counting(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made if self.num_batches_tracked is None else made * (1 + 0.1 * self.num_batches_tracked)


class Modulo(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + int(self.num_batches_tracked) % 3)


class Faster(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.running_mean, self.running_var
        return F.batch_norm(x, *held, self.weight, self.bias, self.training, 0.35, self.eps)


class WarmingUp(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            share = max(share, 1 / float(self.num_batches_tracked))
        held = self.running_mean, self.running_var
        return F.batch_norm(x, *held, self.weight, self.bias, self.training, share, self.eps)


class Twice(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5 * super().forward(x * x)


class Still(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, True) if self.training else super().forward(x)


class EvaluatedWithin(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.norm(x)
        self.norm.eval()
        again = self.norm(2 * x)
        self.norm.train()
        return made + again


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counting, "whose output depends on its running statistics, momentum or num_batches_tracked"),
        (Modulo, "whose forward reads or moves its own momentum or num_batches_tracked:"),
        (Faster, "moves its running statistics in a way of its own"),
        pytest.param(WarmingUp, "moves its running statistics in a way of its own", marks=pytest.mark.sweep),
        pytest.param(Twice, "moves its running statistics in a way of its own", marks=pytest.mark.sweep),
        pytest.param(Still, "moves its running statistics in a way of its own", marks=pytest.mark.sweep),
        (EvaluatedWithin, "is called in eval mode behind a call in training mode"),
    ],
)
@pytest.mark.parametrize("micro_batches", sweep([1, 3], quick=[3]))
def test_a_subclass_with_a_rule_of_its_own(kind, words, micro_batches):
    """It cannot be deferred, and is told so; as in each micro-batch it trains as the plain model does in one."""
    made = workload(lambda: nn.Sequential(kind(WIDTH), nn.Linear(WIDTH, 1)), rows=12)
    plan = make_plan(made, micro_batches=micro_batches)
    with pipeline_of(made, plan) as pipeline, pytest.raises(UsageError, match=words) as raised:
        pipeline.step(made.make_batch(12, 0))
    assert "batch_norm='micro_batch'" in str(raised.value.hint)
    with pipeline_of(made, make_plan(made, micro_batches=1), batch_norm="micro_batch") as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10, 12))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, behind a break
@pytest.mark.parametrize("kind", [Activated, Counting])
def test_a_subclass_in_a_compiled_partition(kind):
    """Its own forward runs between the compiled parts: the same losses as uncompiled, and the same refusal."""
    made = workload(lambda: nn.Sequential(kind(WIDTH), nn.Linear(WIDTH, 1)), rows=12)
    found = []
    for options in (None, {"backend": "eager"}):
        case = replace(made, compile=options)
        with pipeline_of(case, make_plan(case, micro_batches=3)) as pipeline:
            if kind is Counting:
                with pytest.raises(UsageError, match="whose output depends on its running statistics"):
                    pipeline.step(case.make_batch(12, 0))
            else:
                found.append([pipeline.step(case.make_batch(12, n)) for n in range(3)])
    assert kind is Counting or found[0] == pytest.approx(found[1], rel=1e-12)


class Assigning(nn.Module):
    """Puts other running statistics in the places of its BatchNorm's, from some forward on."""

    def __init__(self, first: int, *, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.first, self.frozen, self.calls = nn.BatchNorm1d(WIDTH), first, frozen, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        made = self.norm.train(self.training and not self.frozen)(x)
        if self.calls >= self.first:
            self.norm.running_mean = self.norm.running_mean * 0.5
        return made


@pytest.mark.long
@pytest.mark.parametrize("first", [1, 2])
def test_running_statistics_that_are_assigned(first):
    """They would be moved with the rest at the step's end: refused, unless the module does not train."""
    made = workload(lambda: nn.Sequential(Assigning(first), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n in range(1, first):
            pipeline.step(made.make_batch(12, n))
        with pytest.raises(UsageError, match=r"partition '0' (uses|assigns) the running statistics of 0\.norm"):
            pipeline.step(made.make_batch(12, first))
    made = workload(lambda: nn.Sequential(Assigning(first, frozen=True), nn.Linear(WIDTH, 1)), rows=12)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1), batch_norm="micro_batch") as pipeline:
        assert_plain(made, reference, pipeline, (12, 10, 12))


class Catching(nn.Module):
    """Gives its BatchNorm one row, or all where that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x + self.norm(x[:1])
        except ValueError:
            return x + self.norm(x)


class Evaluating(Catching):
    """Evaluates it behind a call that trains it, if it can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm.train()(x)
        try:
            return y + self.norm.eval()(x)
        except Exception:  # noqa: BLE001 - as such code has it
            return y
        finally:
            self.norm.train()


@pytest.mark.parametrize(("kind", "words"), [(Catching, "which the model catches"), (Evaluating, "is called in eval")])
def test_an_error_that_the_model_catches(kind, words):
    """Torch counts such a call, and here nobody could tell; as it is in training without a plan it is all the same."""
    made = workload(lambda: nn.Sequential(kind(), nn.Linear(WIDTH, 1)), rows=12)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline, pytest.raises(UsageError, match=words):
        pipeline.step(made.make_batch(12, 0))
    with pipeline_of(made, make_plan(made, micro_batches=1), batch_norm="micro_batch") as pipeline:
        assert_plain(made, Reference(made), pipeline, (12, 10, 12))


def test_what_cannot_run_is_refused():
    """SyncBatchNorm, a forward that was set on the object and an unknown choice are errors in words."""
    with pytest.raises(UsageError, match=r"0\.1 is a SyncBatchNorm.*other partitions"):
        DeferredStatistics({"part": nn.Sequential(nn.Sequential(nn.Identity(), nn.SyncBatchNorm(4)))}, "micro_batch")
    patched = nn.BatchNorm1d(4)
    patched.forward = lambda x: x
    with pytest.raises(UsageError, match="forward of its own"):
        DeferredStatistics({"part": nn.Sequential(patched)}, "deferred")
    made = first()
    with pytest.raises(UsageError, match="batch_norm='never' is not allowed"):
        pipeline_of(made, make_plan(made), batch_norm="never")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "micro_batches"), [(8, 3), (8, 4), (5, 3), (9, 5)])
def test_no_micro_batch_of_one_row_without_need(rows, micro_batches):
    """Whatever rows a batch has, from two on, it trains; running statistics are the plain model's where they can be."""
    made = replace(first(), batch_size=rows)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        assert_plain(made, reference, pipeline, tuple(range(2, rows + 1)))
        with pytest.raises(UsageError, match=r"float64\[1, 8\]\) has one value of each channel") as caught:
            pipeline.step(made.make_batch(1, 0))
    assert "drop_last" in (caught.value.hint or "")


@pytest.mark.long
def test_micro_batches_that_are_planned_with_one_row():
    """They are told in words too, whatever the batch."""
    made = replace(first(), batch_size=3)
    pipeline = pipeline_of(made, make_plan(made, micro_batches=3))
    with pipeline, pytest.raises(UsageError, match="which BatchNorm cannot normalise"):
        pipeline.step(made.make_batch(3, 0))
