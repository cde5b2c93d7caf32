"""Forwards that change more than their outputs: every micro-batch and recompute sees what it has in plain torch."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from changing_models import (
    CHANGING,
    AliasRead,
    Assigned,
    InNorm,
    InPlace,
    ReadAround,
    WrittenAround,
    made_of,
    micro_batched,
    sharing,
    tied_and_renormed,
    tossing,
)
from kept import kept
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm
from workloads import WIDTH, Reference, graph_of, make_plan, pipeline_of, workload

from assigner.errors import MarkingError, UsageError
from assigner.model.deferred.reach import reach
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking import partition_graph
from assigner.runtime.forward.pythonvalues import has_user_code
from assigner.runtime.forward.state import WrittenTensors
from assigner.runtime.stages.localpartitions import LocalPartitions, UnreadState

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload

EXACT = 1e-10


@kept
def changing(name: str) -> Workload:
    """One object for each name, so that it is captured once."""
    return made_of(CHANGING[name])


@pytest.mark.parametrize(
    ("micro_batches", "remat"),
    [
        (1, "always"), (3, "except_last"),  # one that recomputes; several, of which some do and the last one does not
        pytest.param(1, "never", marks=pytest.mark.sweep), pytest.param(3, "never", marks=pytest.mark.sweep),
        pytest.param(3, "always", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", CHANGING)
def test_a_forward_may_change_more_than_its_outputs(name, micro_batches, remat):
    """Losses, gradients, weights and buffers are those of plain forwards one after the other, however they are kept."""
    trains_as_plain(changing(name), micro_batches, remat)


@pytest.mark.parametrize("middle", [InPlace, Assigned, InNorm])
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, "always"), (3, "except_last")])
def test_a_buffer_is_read_in_its_turn(micro_batches, remat, middle):
    """Between partitions, before a module changes it and behind that."""
    trains_as_plain(workload(partial(ReadAround, middle=middle), "first", "middle", "last"), micro_batches, remat)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(ReadAround, late=True), "reads 'middle.scale' .* 'last', .* behind 'middle'"),
        (partial(ReadAround, early=True), "reads 'middle.scale' .* 'first', .* in front of 'middle'"),
        (
            partial(ReadAround, late=True, middle=Assigned),
            "another tensor in its place, and 'last', .* keeps the first",
        ),
        (AliasRead, "another tensor in its place, and 'middle', which needs that, keeps the first"),
        (partial(WrittenAround, early=True), "mul_.*, and so does 'middle' itself"),
        (WrittenAround, "mul_.*, and so does 'middle' itself"),
        (partial(WrittenAround, batch=True), "mul_.*, and so does 'middle' itself"),
        (partial(WrittenAround, middle=Assigned), "mul_.*, and so does 'middle' itself"),
    ],
)
def test_a_buffer_that_is_not_reached_in_its_turn(make, message):
    """Where its reader runs on the other side of the change, or keeps another tensor, or both change it."""
    with pytest.raises(MarkingError, match=message):
        partition_graph(workload(make, "first", "middle", "last"))


def test_a_change_by_an_unmarked_module_names_who_runs_it():
    """The order is that of the partitions, and the module is in one of them."""
    with pytest.raises(MarkingError, match=r"'middle' changes it, and 'last', .* runs behind 'first', which runs it"):
        partition_graph(workload(partial(ReadAround, late=True), "first", "last"))


def trains_as_plain(made: Workload, micro_batches: int, remat: str) -> None:
    """Some steps under a plan, and of the plain model."""
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        for n in range(4):
            batch = made.make_batch(micro_batches * 2, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, micro_batches), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert set(pipeline.state_dict()) == set(reference.model.state_dict())
        assert reference.distance(pipeline.state_dict().items()) < EXACT


def test_draws_of_python_and_numpy_depend_on_the_batch_alone():
    """Stages, rematerialisation and what was drawn before change no draw; the script's own generators stay."""
    made = workload(tossing)
    found = []
    for stages, remat in (([(0, ["0", "1", "2"])], "never"), ([(0, ["0"]), (0, ["1", "2"])], "always")):
        random.seed(len(found))
        np.random.seed(len(found))
        with pipeline_of(made, make_plan(made, stages), remat=remat) as pipeline:
            before = random.getstate(), np.random.get_state()[2]
            found.append([pipeline.step(made.make_batch(8, n)) for n in range(4)])
            found.append([float(each.detach().sum()) for _, each in pipeline.named_parameters()])
            assert (random.getstate(), np.random.get_state()[2]) == before
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len(set(found[0])) == 4


class Annealed(nn.Linear):
    """Is left out by chance, from its fourth forward on: stochastic depth whose rate begins at 0."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.draw, self.calls = draw, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (self.draw() if self.calls > 3 else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_draws_that_begin_late_depend_on_the_batch_alone(draw):
    """A partition that has not drawn in its first forwards draws the same under every plan all the same."""
    made = workload(lambda: nn.Sequential(Annealed(draw), nn.Linear(WIDTH, 1)))
    found = []
    for stages, remat in (([(0, ["0", "1"])], "never"), ([(0, ["0"]), (0, ["1"])], "always")):
        random.seed(len(found))
        np.random.seed(len(found))
        with pipeline_of(made, make_plan(made, stages, micro_batches=2), remat=remat) as pipeline:
            found.append([pipeline.step(made.make_batch(8, n)) for n in range(4)])
    assert found[0] == found[1]


class Iterating(nn.Linear):
    """Keeps a generator object."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rates = (0.1 * n for n in range(3))


def test_an_attribute_that_python_does_not_copy():
    """It is refused with its name and its module's."""
    made = workload(lambda: nn.Sequential(nn.Sequential(nn.Tanh(), Iterating()), nn.Linear(WIDTH, 1)))
    with pytest.raises(UsageError, match=r"attribute 'rates' of module '0\.1' \(generator\) cannot be copied"):
        pipeline_of(made, make_plan(made))


class Activation:
    """Is called by a layer of torch's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.mark.parametrize(
    ("activation", "is_users"),
    [
        (F.gelu, False), (partial(F.gelu, approximate="tanh"), False), (nn.ReLU(), False),
        (Activation(), True), (lambda x: x.relu(), True), (partial(Activation().__call__), True),
    ],
)  # fmt: skip
def test_what_a_layer_of_torchs_calls(activation, is_users):
    """The user's code runs in a layer that was given some, and is met, for what it may change: each time."""
    layer = nn.TransformerEncoderLayer(WIDTH, 1, WIDTH, activation=activation)
    for _ in range(2):
        assert has_user_code(layer) == is_users
        assert not is_users or any(each is activation for _, each in reach({}, layer.named_modules()))


def jittered(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + random.random())


fx.wrap("jittered")


class Jittering(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return jittered(super().forward(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return jittered(self.inner(x))


@pytest.mark.parametrize("built", [lambda: fx.symbolic_trace(Outer()), lambda: weight_norm(Jittering(WIDTH, WIDTH))])
def test_draws_of_code_in_classes_that_torch_makes(built):
    """Of a graph, and around a parametrization: a recompute draws what its first forward has drawn."""
    made, found = workload(lambda: nn.Sequential(built(), nn.Linear(WIDTH, 1))), []
    assert has_user_code(graph_of(made).deferred.model[0])
    for remat in ("never", "always"):
        with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat) as pipeline:
            losses = [pipeline.step(made.make_batch(8, n)) for n in range(2)]
            found.append((losses, pipeline.gradients()))
    (losses, gradients), (others, again) = found
    assert losses == others
    assert all(torch.allclose(gradients[name], again[name], rtol=EXACT, atol=EXACT) for name in gradients)


def test_a_forward_that_the_user_has_put_in_a_class_of_torchs(monkeypatch):
    """It is looked for where it is."""
    assert not has_user_code(nn.Tanh())
    monkeypatch.setattr(nn.Tanh, "forward", lambda _, x: jittered(x.tanh()))
    assert has_user_code(nn.Tanh())
    assert vocabulary_of([nn.Tanh()]).draws


class Keeping(nn.Linear):
    """Looks at the gradient of its last input, a leaf of its own."""

    leaf: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last, self.leaf = self.leaf, x.detach().clone().requires_grad_()
        y = super().forward(self.leaf)
        return y if last is None else y * (1 + last.grad.norm())


class Retaining(nn.Linear):
    """Of its last output, which is no leaf, and in a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, last = super().forward(x), self.kept.pop() if self.kept else None
        if y.requires_grad:
            y.retain_grad()
            self.kept.append(y)
        return y.tanh() if last is None or last.grad is None else y.tanh() * (1 + last.grad.norm())


@pytest.mark.parametrize("kind", [Keeping, Retaining])
def test_the_gradient_of_a_tensor_that_a_partition_keeps(kind):
    """It is that of the whole batch before; of micro-batches, or where the forward runs again, it would be another."""
    made = workload(lambda: nn.Sequential(kind(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    batches, reference = [made.make_batch(8, n) for n in range(3)], Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for batch in batches:
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=EXACT)
    for micro_batches, remat in ((1, "always"), (2, "never")):
        plan = make_plan(made, micro_batches=micro_batches)
        with pipeline_of(made, plan, remat=remat) as pipeline, pytest.raises(UsageError, match="the gradient of"):
            deque(map(pipeline.step, batches), maxlen=0)


@pytest.mark.parametrize("name", ["Assigned", "Lazy", "InPlace"])
def test_a_checkpoint_has_the_buffers_as_they_are(name, tmp_path):
    """Assigned buffers, and such as were None at first, are saved, loaded and evaluated with as any other."""
    made = changing(name)
    batches = [made.make_batch(8, n) for n in range(4)]
    with pipeline_of(made, make_plan(made, micro_batches=1), remat="always") as pipeline:
        for batch in batches[:2]:
            pipeline.step(batch)
        pipeline.save(tmp_path / "kept")
        state = {key: tensor.detach().clone() for key, tensor in pipeline.state_dict().items()}
        expected = [pipeline.step(batch) for batch in batches[2:]]
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.load(tmp_path / "kept")
        found = pipeline.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert [pipeline.step(batch) for batch in batches[2:]] == expected


@pytest.mark.parametrize("remat", ["never", "always", "plan"])
def test_a_shared_weight_that_one_partition_writes(remat):
    """On one worker all partitions see it written, and each backward reads it as its forward did."""
    made = tied_and_renormed()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2, remat=["table"]), remat=remat) as pipeline:
        for n in range(4):
            batch = made.make_batch(4, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 2), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT


@pytest.mark.parametrize(
    ("other", "micro_batches", "said"),
    [(1, 1, "another worker holds too"), (0, 2, "another stage of its worker has too"), (0, 1, None)],
)
def test_a_shared_weight_that_another_stage_reads(other, micro_batches, said):
    """Another worker would not see what is written, and a stage of the same one too much: refused, with its name."""
    made = tied_and_renormed()
    graph = graph_of(made)
    plan = make_plan(made, [(0, ["table"]), (0, ["body"]), (other, ["head"])], micro_batches=micro_batches)
    share = LocalPartitions(graph, plan, "worker:0/cpu", torch.device("cpu"), UnreadState(graph, 0))
    written = WrittenTensors(share.modules.values(), share.held_elsewhere())
    written.add(share.parameters["body.weight"])
    with pytest.raises(UsageError, match=rf"writes table\.weight, which {said}") if said else contextlib.nullcontext():
        written.add(share.parameters["table.weight"])


class Late(nn.Linear):
    """Writes a tensor in place from its fourth forward on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("late", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3:
            self.write()
        return super().forward(x) * self.scale

    def write(self) -> None:
        raise NotImplementedError


class LateBuffer(Late):
    """A buffer that the output is made with."""

    def write(self) -> None:
        self.scale.mul_(0.5)


class LateWeight(Late):
    """Its weight."""

    def write(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.9)


class LateCount(Late):
    """A count that nothing is made with."""

    def write(self) -> None:
        self.late.add_(1)


class LateNorm(Late):
    """Running statistics, whose changes torch does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return self.norm.train(self.calls > 3)(made)

    def write(self) -> None:
        """They are written by their module."""


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(LateBuffer, "scale"), (LateWeight, "weight"), (LateNorm, "norm.num_batches_tracked"), (LateCount, "late")],
)
def test_a_write_that_begins_late(kind, name, remat):
    """It is refused in the second of two micro-batches, whose first one needs what was there; a lone one may begin."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 1)))
    with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat, batch_norm="micro_batch") as pipeline:
        pipeline.step(made.make_batch(8, 0))
        if kind is LateCount and remat == "never":  # no graph reads it
            pipeline.step(made.make_batch(8, 1))
        else:
            with pytest.raises(UsageError, match=rf"partition '1' begins to write 1\.{name} in place") as refused:
                pipeline.step(made.make_batch(8, 1))
            assert "from the first forward on" in str(refused.value.hint)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat, batch_norm="micro_batch") as pipeline:
        for n in range(5):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.state_dict().items()) < EXACT


class LateStatistics(nn.Linear):
    """Begins in its second forward to move running statistics that are no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        made = super().forward(x)
        return F.batch_norm(made, self.mean, self.variance, training=True) if self.calls > 1 else made


class LateInstances(LateStatistics):
    """An InstanceNorm that begins to train, and counts no batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        made = nn.Linear.forward(self, x)
        return self.norm.train(self.calls > 1)(made.T[None])[0].T


class LateTraining(LateStatistics):
    """Is normalised by running statistics from the first forward on, and moves them from the third on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.batch_norm(nn.Linear.forward(self, x), self.mean, self.variance, training=self.calls > 2)


class UncountedTraining(LateStatistics):
    """The same with a BatchNorm that counts no batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.num_batches_tracked = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm.train(self.calls > 2)(nn.Linear.forward(self, x))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("kind", [LateStatistics, LateInstances, LateTraining, UncountedTraining])
def test_statistics_that_begin_late_and_that_nothing_counts(kind, micro_batches):
    """Recomputes move them no further, and the backwards of earlier micro-batches find them as they were."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 1)))
    found = []
    for remat in ("never", "always"):
        plan = make_plan(made, micro_batches=micro_batches)
        with pipeline_of(made, plan, remat=remat, batch_norm="micro_batch") as pipeline:
            losses = [pipeline.step(made.make_batch(8, n)) for n in range(3)]
            found.append((losses, [each.tolist() for each in pipeline.state_dict().values()]))
    assert found[0] == found[1]


class Remembering(nn.Module):
    """A loss that weighs by how often it was called, and by a mean that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = (output - targets).square().mean()
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss, alpha=0.5)
        return loss / self.mean * self.calls


def remembering() -> Callable[..., torch.Tensor]:
    """A function that counts, lists and remembers in its closure."""
    calls, seen = 0, [1.0]

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(seen[-1] / 2)
        return (output - targets).square().mean() * calls * sum(seen)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("kind", [Remembering, remembering])
def test_a_loss_with_a_memory(kind, remat):
    """It is called twice where the last partition runs again, and remembers once."""
    plain = workload(lambda: nn.Sequential(nn.Linear(WIDTH, 1)), loss=kind())
    reference = Reference(plain)
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, 1)), loss=kind())
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(4):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT


@pytest.mark.parametrize("remat", ["never", "always"])
def test_two_partitions_on_one_storage(remat):
    """What one writes the other reads, and the recompute of either reads it as its forward did."""
    made = sharing()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(4, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 2), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.state_dict().items()) < EXACT
