"""Loss and outputs without training, on one worker: those of the plain model in eval mode, and nothing is disturbed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from odd_values import CASES
from torch import nn
from workloads import WIDTH, Reference, graph_of, language, make_plan, normalised, pairs, pipeline_of, towers, workload

from assigner import Pipeline
from assigner.errors import MarkingError, UsageError

EXACT = 1e-10


def modes_of(pipeline: Pipeline) -> list[bool]:
    return [module.training for held in pipeline._installed.share.modules.values() for module in held.children()]


def check(found: Any, expected: Any) -> None:
    """The same structure, tensors and plain values."""
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(expected)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True)
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=EXACT)
        else:
            assert type(one) is type(other)
            assert one == other


def plain_loss(reference: Reference, batch: Any) -> float:
    return float(reference.made.compute_loss(reference.output(batch[0]), batch[1]))


def test_evaluation_between_steps():
    """Loss and outputs are the plain model's with the weights of the moment; training does not notice them."""
    made = language(dropout=0.3)
    graph = graph_of(made)
    plan = make_plan(made)
    with Pipeline(made, plan, graph=graph) as pipeline, Pipeline(made, plan, graph=graph) as other:
        reference = Reference(made)
        torch.manual_seed(3)
        state = torch.get_rng_state()
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == other.step(batch)
            reference.model.load_state_dict(pipeline.state_dict(), strict=False)
            for rows in (8, 3):
                ids, _ = batch = made.make_batch(rows, 10 + n)
                assert pipeline.evaluate(batch) == pytest.approx(plain_loss(reference, batch), abs=EXACT)
                torch.testing.assert_close(pipeline.forward(ids), reference.output(ids), rtol=0, atol=EXACT)
            longer = torch.zeros(3, 6, dtype=torch.long)
            torch.testing.assert_close(pipeline.forward(longer), reference.output(longer), rtol=0, atol=EXACT)
        assert torch.equal(state, torch.get_rng_state())
        assert all(module.training for held in pipeline._installed.share.modules.values() for module in held.modules())


def test_running_statistics_are_used_and_left():
    """BatchNorm normalises by its running values in eval, and leaves them as they were."""
    made = workload(normalised)
    reference = Reference(made)
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        kept = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
        reference.model.load_state_dict(kept)
        batch = made.make_batch(7, 1)
        assert pipeline.evaluate(batch) == pytest.approx(plain_loss(reference, batch), abs=EXACT)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in pipeline.state_dict().items())
        again = [pipeline.step(made.make_batch(8, 2)) for _ in range(2)]
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert again == [pipeline.step(made.make_batch(8, 2)) for _ in range(2)]


def test_no_graph_and_one_forward():
    """Whatever the plan rematerialises, eval runs each forward once, without gradients, and keeps no value."""
    seen: list[bool] = []
    note = seen.append  # a list that several partitions reach would be refused

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note(torch.is_grad_enabled())
            return super().forward(x)

    made = workload(lambda: nn.Sequential(Watching(WIDTH, WIDTH), Watching(WIDTH, 1)))
    with Pipeline(made, make_plan(made, micro_batches=2), remat="always", graph=graph_of(made)) as pipeline:
        pipeline.evaluate(made.make_batch(8, 0))
        seen.clear()
        pipeline.evaluate(made.make_batch(8, 0))
        assert seen == [False] * 4
        assert not pipeline.forward(made.make_batch(8, 0)[0]).requires_grad
        assert not pipeline.gradients()


@pytest.mark.long
def test_the_models_own_eval():
    """A part that its builder has put in eval mode, or that refuses to leave training, stays as it is."""

    class Stubborn(nn.Dropout):
        def train(self, _: bool = True) -> Stubborn:
            return super().train()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5).eval(), Stubborn(0.5), nn.Linear(WIDTH, 1))

    made = workload(build)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as pipeline:
        modes = modes_of(pipeline)
        x, _ = made.make_batch(8, 0)
        assert not torch.allclose(pipeline.forward(x), Reference(made).output(x))
        assert modes == [True, False, True, True]
        assert modes == modes_of(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["structures", "layouts", "middle", "chosen"])
def test_any_value_in_eval(name):
    """Values of every kind between partitions come through in eval as well, and outputs keep their structure."""
    made = CASES[name]()
    reference = Reference(made)
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        batch = made.make_batch(5, 0)
        assert pipeline.evaluate(batch) == pytest.approx(plain_loss(reference, batch), abs=EXACT)
        expected, found = reference.output(batch[0]), pipeline.forward(batch[0])
        check(found, expected)


class Many(nn.Module):
    """Outputs with the rows in several places, and without."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.b(torch.tanh(self.a(x)))
        made = {
            "rows": y, "behind": y.t(), "tokens": y.view(-1, 2), "many": [None, (y > 0, 3, "word")],
            "weight": self.b.weight, "scalar": self.b.bias.sum(), "width": x.shape[1],
        }  # fmt: skip
        wrong = {"": None, "mean": y.mean(), "square": y @ y.t(), "count": x.shape[0], "mode": self.training}
        return {**made, "wrong": wrong[self.wrong]}


@pytest.mark.long
def test_outputs_are_joined_along_their_rows():
    """Rows first, rows behind, flattened tokens; what has no rows comes out once, a mean as that of all rows."""
    for kind in ("mode", "mean"):
        made = workload(lambda kind=kind: Many(kind), "*")
        reference = Reference(made)
        with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
            for rows in (8, 5, 1):
                x, _ = made.make_batch(rows, rows)
                check(pipeline.forward(x), reference.output(x))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["square", "count"])
def test_outputs_that_cannot_be_joined(wrong):
    """A matrix of rows by rows, a number of rows: fine for one micro-batch, else an error that names it."""
    made = workload(lambda: Many(wrong), "*")
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as whole:
        x, _ = made.make_batch(5, 1)
        check(whole.forward(x), Reference(made).output(x))
    pipeline = Pipeline(made, make_plan(made), graph=graph_of(made))
    with pytest.raises(UsageError, match=r"output\['wrong'\].* cannot be put together of its micro-batches'") as caught:
        pipeline.forward(x)
    assert caught.value.hint


class Helped(nn.Module):
    """A part that only training needs, and glue that only eval has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.aside = (nn.Linear(WIDTH, n) for n in (WIDTH, 1, 1))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.stem(x))
        if self.training:
            return self.head(F.dropout(y, 0.2)), self.aside(y)
        return self.head(y * 2).sigmoid()


@pytest.mark.long
def test_parts_that_eval_does_not_call():
    """A marked module that eval mode leaves out is left out; the loss sees what the model gives in eval mode."""

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return sum(F.mse_loss(each, target) for each in (output if isinstance(output, tuple) else (output,)))

    made = workload(Helped, "*", loss=loss)
    reference = Reference(made)
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        batch = made.make_batch(7, 0)
        assert pipeline.evaluate(batch) == pytest.approx(plain_loss(reference, batch), abs=EXACT)
        torch.testing.assert_close(pipeline.forward(batch[0]), reference.output(batch[0]), rtol=0, atol=EXACT)
        pipeline.step(batch)
        assert {"aside.weight", "head.weight"} < set(pipeline.gradients())


class UsedAgain(nn.Module):
    """An unmarked part in front, and in eval mode behind the last partition, too."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.first, self.last = part, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.first(self.part(x))))
        return (y if self.training else self.part(y)).mean(1, keepdim=True)


class Moving(nn.Module):
    """Moves something in training, by which it scales in eval mode."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.scale, self.calls = way, nn.Linear(WIDTH, WIDTH), 1.0, [0]
        self.kept = torch.ones(WIDTH, dtype=torch.float64)
        self.register_buffer("put", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            by = {"attribute": self.scale, "later": self.scale, "list": 1 + self.calls[0], "tensor": self.kept}
            return self.layer(x) * by.get(self.way, self.put)
        self.count += 1
        if self.way == "buffer":
            self.put = self.put * 0.9
        elif self.way == "attribute" or (self.way == "later" and not self.count.is_meta and _is_third(self.count)):
            self.scale = self.scale * 0.9
        elif self.way == "list":
            self.calls[0] += 1
        elif self.way == "tensor":
            self.kept.mul_(0.9)
        return self.layer(x)


def hooked(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda *given: given[2] * 2)
    return part


def _is_third(count: torch.Tensor) -> bool:
    return not isinstance(count, torch._subclasses.FakeTensor) and bool(count == 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(WIDTH),
        nn.Tanh,
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        lambda: hooked(nn.LayerNorm(WIDTH)),
        lambda: Moving("buffer"),
    ],
    ids=["weights", "nothing", "statistics", "hooks", "a buffer that is replaced"],
)
def test_a_part_that_eval_uses_again(make):
    """Behind the last partition it is what it is by now in front: its weights and buffers are sent there."""
    made = workload(lambda: UsedAgain(make()), "first", "last")
    reference = Reference(made)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert pipeline.evaluate(batch) == pytest.approx(plain_loss(reference, batch), abs=EXACT)
            torch.testing.assert_close(pipeline.forward(batch[0]), reference.output(batch[0]), rtol=0, atol=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("attribute", "'part' changes its attribute 'scale'"),
        ("list", "'part' changes its attribute 'calls'"),
        ("tensor", "'part' changes its attribute 'kept'"),
        ("later", "'first' changes its attribute 'scale'"),
    ],
)
def test_a_part_that_eval_uses_again_and_training_changes(way, words):
    """Python values are sent nowhere: what training moves cannot be read elsewhere, also where it begins later."""
    made = workload(lambda: UsedAgain(Moving(way)), "first", "last")
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as pipeline:
        batch = made.make_batch(8, 0)

        def run() -> None:
            for _ in range(3):
                pipeline.step(batch)
                pipeline.evaluate(batch)

        with pytest.raises(MarkingError, match=words):
            run()


def test_inference_alone(tmp_path):
    """Without training there is no optimizer and no gradient, a workload needs neither loss nor optimizer."""
    made = towers()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as trained:
        trained.step(made.make_batch(8, 0))
        trained.save(tmp_path / "checkpoint")
        batch = made.make_batch(7, 1)
        expected, loss = trained.forward(batch[0]), trained.evaluate(batch)
    bare = replace(made, loss=None, optimizer=None)
    pipeline = Pipeline(bare, make_plan(made), graph=graph_of(made), training=False)
    pipeline.load(tmp_path / "checkpoint")
    torch.testing.assert_close(pipeline.forward(batch[0]), expected, rtol=0, atol=0)
    assert not any(parameter.requires_grad for _, parameter in pipeline.named_parameters())
    with pytest.raises(UsageError, match="training=False"):
        pipeline.step(batch)
    with pytest.raises(UsageError, match="training=False"):
        pipeline.optimizer.step()
    torch.testing.assert_close(pipeline.forward(batch[0]), expected, rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"Workload\.loss is missing"):
        pipeline.evaluate(batch)
    with Pipeline(replace(made, optimizer=None), make_plan(made), graph=graph_of(made), training=False) as other:
        other.load(tmp_path / "checkpoint")
        assert other.evaluate(batch) == loss


@pytest.mark.long
def test_a_model_without_parameters():
    """Nothing can be trained in it, and forwards run."""
    made = workload(lambda: nn.Sequential(nn.Tanh(), nn.Flatten(), nn.AvgPool1d(WIDTH)))
    batch = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made), training=False) as pipeline:
        torch.testing.assert_close(pipeline.forward(batch[0]), batch[0].tanh().mean(1, keepdim=True))
        assert pipeline.evaluate(batch) > 0


def test_missing_parts_of_a_workload():
    """Training asks for what it needs, in words."""
    made = towers()
    with pytest.raises(UsageError, match=r"Workload\.optimizer is missing"):
        Pipeline(replace(made, optimizer=None), make_plan(made), graph=graph_of(made))
    pipeline = Pipeline(replace(made, loss=None), make_plan(made), graph=graph_of(made))
    with pytest.raises(UsageError, match=r"Workload\.loss is missing"):
        pipeline.step(made.make_batch(8, 0))


def test_a_rank_that_is_not_there():
    """`to` names a rank of the run."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    pipeline = Pipeline(made, make_plan(made), graph=graph_of(made))
    with pytest.raises(UsageError, match="there is no rank 1: the run has 1"):
        pipeline.forward(made.make_batch(8, 0)[0], to=1)


def test_several_inputs():
    """A tuple of inputs is given as a batch has it; every rank may have the output."""
    made = towers()
    generator = torch.Generator().manual_seed(0)
    inputs, _ = pairs(9, generator)
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        found = pipeline.forward(inputs, to=None)
        torch.testing.assert_close(found, Reference(made).output(inputs), rtol=0, atol=EXACT)


class _EvalAlone(nn.Module):
    """Evaluations scale the input by what training does not use, and add statistics of a later partition."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.norm = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
        )

    def forward(self, x):
        x = x if self.training else x * self.scale + self.norm.running_mean
        return self.norm(self.first(x)).mean(1, keepdim=True)


def test_evaluations_read_what_was_loaded(tmp_path):
    """What an evaluation is lent is what was trained or loaded last, from a state_dict as from a checkpoint."""
    made = workload(_EvalAlone, "first", "norm")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        batch = made.make_batch(8, 1)

        def same() -> bool:
            reference.model.eval()
            with torch.no_grad():
                expected = made.loss(reference.model(batch[0]), batch[1])
            reference.model.train()
            return float(pipeline.evaluate(batch)) == pytest.approx(float(expected), rel=1e-10)

        assert same()
        pipeline.step(batch)
        pipeline.save(tmp_path / "at")
        reference.step(batch)
        assert same()
        kept = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
        other = {name: tensor * 2 for name, tensor in kept.items()}
        reference.model.load_state_dict(other)
        pipeline.load_state_dict(other)
        assert same()
        assert torch.equal(pipeline.full_state_dict()["scale"], other["scale"])
        reference.model.load_state_dict(kept)
        pipeline.load(tmp_path / "at")
        assert same()
