"""Partitions of a stage that keep their graphs are joined: one backward goes through them, and tells where it is."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from workloads import (
    WIDTH,
    Language,
    Reference,
    diamond,
    language,
    make_plan,
    normalised,
    pipeline_of,
    skips,
    workload,
)

from assigner.errors import UsageError
from assigner.runtime.stages.reduction import Reduction
from assigner.runtime.step import graphs

if TYPE_CHECKING:
    from assigner.model.workload import Workload


def gradients_of(made: Workload, plan: Any, batch: Any) -> dict[str, torch.Tensor]:
    """What one step leaves in the parameters."""
    with pipeline_of(made, plan) as pipeline:
        for _ in range(2):  # partitions are joined once a forward of theirs was watched
            pipeline.optimizer.zero_grad()
            pipeline.step(batch, update=False)
        return {name: each.grad.clone() for name, each in pipeline.named_parameters() if each.grad is not None}


def backwards(monkeypatch: pytest.MonkeyPatch, pipeline: Any, batch: Any) -> int:
    """How many times torch's engine is asked in a step."""
    count, plain = [0], graphs._engine_run_backward

    def counted(*args: Any, **settings: Any) -> None:
        count[0] += 1
        plain(*args, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_engine_run_backward", counted)
        pipeline.step(batch)
    return count[0]


@pytest.mark.parametrize("made", [language, skips, diamond])
def test_one_stage_has_the_gradients_of_the_plain_model_to_the_last_bit(made):
    """In one micro-batch: the same graph, and the same sums where a value or a weight has several readers."""
    made = made()
    batch = made.make_batch(8, 0)
    found = gradients_of(made, make_plan(made, micro_batches=1), batch)
    plain = Reference(made)
    plain.loss(batch).backward()
    wanted = {name: each.grad for name, each in plain.model.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("remat", "count"),
    [((), 1), (("parts.0",), 2), (("parts.1",), 3), (("last",), 2), (("parts.0", "parts.1", "parts.2", "last"), 4)],
)
def test_what_runs_again_has_a_graph_of_its_own(monkeypatch, remat, count):
    """And so each side of it: values that skip it have readers that are joined and others that are not."""
    made = skips()
    batch = made.make_batch(8, 0)
    plan = make_plan(made, micro_batches=2, remat=remat)
    found, wanted = gradients_of(made, plan, batch), gradients_of(made, make_plan(made, micro_batches=2), batch)
    assert max((found[name] - wanted[name]).abs().max() for name in wanted) < 1e-14
    with pipeline_of(made, plan) as pipeline:
        pipeline.step(batch)
        assert backwards(monkeypatch, pipeline, batch) == 2 * count


def test_the_first_forward_is_watched_alone(monkeypatch):
    """Who writes what is not known before: in the first micro-batch each partition has a graph of its own."""
    made = skips()
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        assert backwards(monkeypatch, pipeline, made.make_batch(8, 0)) == 4 + 1
        assert backwards(monkeypatch, pipeline, made.make_batch(8, 1)) == 2


class Counting(nn.Module):
    """Divides by a buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(1.5)
        return x * self.seen


def test_what_forwards_write_is_as_they_left_it_in_each_backward(monkeypatch):
    """A partition that writes is not joined, and with several micro-batches all is as in the plain model."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Counting(), nn.Linear(WIDTH, 1)))
    batch = made.make_batch(8, 0)
    plan = make_plan(made, micro_batches=2)
    plain = Reference(made)
    with pipeline_of(made, plan) as pipeline:
        pipeline.step(batch)
        assert backwards(monkeypatch, pipeline, batch) == 2 * 3
        for rows in [[slice(0, 4), slice(4, 8)]] * 2:
            plain.optimizer.zero_grad()
            for each in rows:
                (plain.loss((batch[0][each], batch[1][each])) / 2).backward()
            plain.optimizer.step()
        wanted = dict(plain.model.named_parameters())
        assert all(torch.allclose(each, wanted[name], rtol=0, atol=1e-14) for name, each in pipeline.named_parameters())


@pytest.mark.long
def test_in_place_code_at_the_head_of_a_partition():
    """It finds what the partition before has made, which a later one reads too."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            return self.last(self.act(made) + made)

    for model in (normalised, InPlace):
        made = workload(model, "*")
        batch = made.make_batch(8, 0)
        found = gradients_of(made, make_plan(made, micro_batches=1), batch)
        plain = Reference(made)
        plain.loss(batch).backward()
        assert all(torch.equal(found[name], each.grad) for name, each in plain.model.named_parameters())


class Snap(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("snapped")


class Snapping(nn.Linear):
    """A layer whose backward fails where it says so."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return Snap.apply(made) if self.armed else made


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("where", range(3))
def test_an_error_in_a_joined_backward_names_its_partition(where):
    """Though one call of torch's goes through all of them."""

    def model() -> nn.Module:
        layers = [Snapping(WIDTH, WIDTH) for _ in range(3)]
        layers[where].armed = True
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    made = workload(model, "*")
    plan = make_plan(made, micro_batches=2)
    with pipeline_of(made, plan) as pipeline:
        for runner in pipeline._installed.executor.runners.values():
            runner.state.was_watched = runner._is_plain = True  # joined from the first step on
        with pytest.raises(ArithmeticError) as caught:
            pipeline.step(made.make_batch(8, 0))
    assert caught.value.__notes__ == [f"in backward of partition '{where}', micro-batch 1 on worker:0/cpu"]


def test_an_error_in_a_hook_names_the_partition_that_has_hooked():
    """A partition whose forward hooks on to its output is not joined: torch runs that hook before it is there."""

    class Hooking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            made.register_hook(lambda gradient: gradient.no_such_method())
            return made

    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooking(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for runner in pipeline._installed.executor.runners.values():
            runner.state.was_watched = True
        with pytest.raises(AttributeError) as caught:
            pipeline.step(made.make_batch(8, 0))
    assert caught.value.__notes__ == ["in backward of partition '1', micro-batch 1 on worker:0/cpu"]


class Threaded(nn.Linear):
    """Computes in a thread, whose nodes have numbers of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(torch.tanh(super(Threaded, self).forward(x))))
        thread.start()
        thread.join()
        return made[0]


def test_what_another_thread_computes_is_not_joined(monkeypatch):
    """torch's engine takes the nodes of one thread in their order: nobody could tell when the partition is done."""
    made = workload(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)], Threaded(WIDTH, 1)), "*")
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert backwards(monkeypatch, pipeline, made.make_batch(8, 1)) == 2 * 2


class ReadTwice(nn.Module):
    """What the first part makes is read by the second, by one behind that, and by the last."""

    def __init__(self, second: type[nn.Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), second(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.parts[0](x)
        return self.last(self.parts[2](self.parts[1](made)) + made)


class Detaching(nn.Linear):
    """Cuts what it reads off from its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach_())


class ReadHooking(nn.Linear):
    """Hooks on to what it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 1.5)
        return super().forward(x)


def test_a_value_that_others_read_elsewhere_stays_what_it_is():
    """Joined partitions have it with its graph, others without: what one does to the first the others do not see."""
    made = workload(lambda: ReadTwice(Detaching), "parts.*", "last")
    plan = make_plan(made, micro_batches=2, remat=["parts.2"])
    with pytest.raises(UsageError, match=r"'parts.1' changes a value that it reads"):
        gradients_of(made, plan, made.make_batch(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [(), ("parts.1",), ("parts.2",)])
def test_a_hook_on_a_value_of_another_partition_is_refused(remat):
    """It would act on a part of the gradient, or twice, as the plan has it."""
    made = workload(lambda: ReadTwice(ReadHooking), "parts.*", "last")
    plan = make_plan(made, micro_batches=1, remat=remat)
    with pytest.raises(UsageError, match=r"'parts.1' hooks on to output 0 of partition 'parts.0'"):
        gradients_of(made, plan, made.make_batch(8, 0))


def test_a_hook_on_all_modules_is_named():
    """What counts operations hooks on to what each module is given, also to what another partition has made."""
    made = workload(lambda: ReadTwice(nn.Linear), "parts.*", "last")
    plan, batch = make_plan(made, micro_batches=1), made.make_batch(8, 0)
    with FlopCounterMode(display=False), pytest.raises(UsageError, match=r"\(ModuleTracker\._fw_pre_hook\)") as caught:
        gradients_of(made, plan, batch)
    assert "around workload.model()" in caught.value.hint
    gradients_of(made, plan, batch)


def test_sums_begin_within_a_joined_backward(monkeypatch):
    """Each behind the partition whose gradients are whole then, and to which nothing is added any more."""
    made = language()
    plan = make_plan(made, micro_batches=2)
    seen: list[tuple[str | None, dict[str, torch.Tensor]]] = []
    with pipeline_of(made, plan) as pipeline:
        executor = pipeline._installed.executor
        pipeline.step(made.make_batch(8, 0), update=False)
        pipeline.optimizer.zero_grad()
        parameters = {name: dict(runner.module.named_parameters()) for name, runner in executor.runners.items()}

        class Spy(Reduction):
            def begin(self, *_: Any, behind: str | None = None) -> None:
                held = parameters[behind or "tokens"]
                seen.append((behind, {name: each.grad.clone() for name, each in held.items() if each.grad is not None}))

        training = pipeline._installed.training
        program = training.variants.planned.program(2, training=True)
        stage_steps = [(each.kind, each.stage, each.micro_batch) for each in program.actions["worker:0/cpu"]]
        last = max(n for n, each in enumerate(stage_steps) if each[1] == 0)
        part = replace(executor._part, reducing=frozenset({stage_steps[last]}), summed=frozenset({0}))
        monkeypatch.setattr(executor, "_part", part)
        executor._cuts.clear()
        cut = pipeline._installed.cutting.split(made.make_batch(8, 0), 2)
        groups = training.variants.groups(cut, training=True)
        executor.run(program, groups[0].micro_batches, 0, places=groups[0].places, reduction=Spy({}))
        left = {name: {n: p.grad for n, p in held.items()} for name, held in parameters.items()}
    assert [behind for behind, _ in seen] == ["head", "blocks.2", "blocks.1", "blocks.0"]
    for behind, found in seen[1:]:  # the head's own weight is that of the tokens, which come last
        assert behind is not None
        assert found
        assert all(torch.equal(each, left[behind][name]) for name, each in found.items())


@pytest.mark.long
def test_a_language_model_of_many_layers_is_one_backward_a_micro_batch(monkeypatch):
    """With its tied weights, its mask and its dropout."""
    made = workload(lambda: Language(4, dropout=0.1), "tokens", "blocks.*", "head", batch=language().batch,
                    loss=language().loss)  # fmt: skip
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert backwards(monkeypatch, pipeline, made.make_batch(8, 1)) == 4


class GivingOn(nn.Module):
    """Gives what it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Rerunning(nn.Linear):
    """A checkpoint, whose code runs in the backward, too, and fails there where it is armed."""

    armed = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if Rerunning.armed and torch._C._current_graph_task_id() != -1:
            raise ArithmeticError("snapped")
        return torch.tanh(super().forward(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_an_error_in_a_checkpoints_code_names_its_partition(monkeypatch):
    """There is neither a hook nor a Function of Python's that would say that code runs in this backward."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Rerunning(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        assert backwards(monkeypatch, pipeline, made.make_batch(8, 1)) == 2
        monkeypatch.setattr(Rerunning, "armed", True)
        with pytest.raises(ArithmeticError) as caught:
            pipeline.step(made.make_batch(8, 2))
    assert caught.value.__notes__ == ["in backward of partition '1', micro-batch 1 on worker:0/cpu"]


def test_what_only_gives_on_takes_no_error_of_another():
    """Its output is that of the partition in front, where both are entered at once."""

    def model() -> nn.Module:
        layers = [Snapping(WIDTH, WIDTH), GivingOn(), nn.Linear(WIDTH, 1)]
        layers[0].armed = True
        return nn.Sequential(*layers)

    made = workload(model, "*")
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for runner in pipeline._installed.executor.runners.values():
            runner.state.was_watched = runner._is_plain = True  # joined from the first step on
        with pytest.raises(ArithmeticError) as caught:
            pipeline.step(made.make_batch(8, 0))
    assert caught.value.__notes__ == ["in backward of partition '0', micro-batch 1 on worker:0/cpu"]


def test_a_hook_of_the_loss_is_looked_at():
    """Once partitions are joined it begins to hook on to the outputs, and to change what a module keeps."""
    held: list[Any] = []

    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if held and outputs.requires_grad:
            outputs.register_hook(lambda _: [setattr(each, "scale", 2.0) for each in held] and None)
        return nn.functional.mse_loss(outputs, targets)

    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, 1)), "*", loss=loss)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for n in range(2):
            pipeline.step(made.make_batch(8, n))
        runners = pipeline._installed.executor.runners.values()
        held += [each for runner in runners for each in runner.module.modules() if isinstance(each, Scaled)]
        with pytest.raises(UsageError, match="the backward of partition '1' changes what its modules keep"):
            pipeline.step(made.make_batch(8, 2))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_hangs_on_where_gradients_arrive_is_looked_at(schedule):
    """No forward has left it in its graph."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(WIDTH, 1)), "*")
    with pipeline_of(made, make_plan(made, micro_batches=4, schedule=schedule)) as pipeline:
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
        held = dict(pipeline.named_parameters())
        weight, bias = held["1.weight"], held["1.bias"].detach()
        arrival = weight.expand_as(weight).grad_fn.next_functions[0][0]

        def hook(*_: object) -> None:
            bias.add_(1.0)

        calls = arrival.register_hook(hook)
        with pytest.raises(UsageError, match="the backward of partition '1' changes a buffer or a weight"):
            pipeline.step(made.make_batch(8, 3))
        calls.remove()


def test_a_sparse_gradient_has_each_place_once():
    """However many micro-batches have added to it: an optimizer of the user's may go by its indices."""
    made = workload(
        lambda: nn.Sequential(nn.Embedding(4, WIDTH, sparse=True), nn.Linear(WIDTH, 1)), "*",
        batch=lambda rows, g: (torch.randint(4, (rows,), generator=g), torch.zeros(rows, 1, dtype=torch.float64)),
    )  # fmt: skip
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        weight = dict(pipeline.named_parameters())["0.weight"]
        for n in range(2):
            pipeline.step(made.make_batch(8, n))
        assert weight.grad.is_coalesced()


def test_others_may_come_behind_the_models_last_partition(monkeypatch):
    """In a stage's order, where it does not read what they make: the loss's graph is the last one's all the same."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.aside, self.last = (nn.Linear(WIDTH, width) for width in (WIDTH, WIDTH, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            self.aside(made)
            return self.last(made)

    made = workload(Aside, "first", "aside", "last")
    batch = made.make_batch(8, 0)
    stage = [(0, ["first", "last", "aside"])]
    with pipeline_of(made, make_plan(made, stage, micro_batches=2)) as pipeline:
        pipeline.step(batch, update=False)
        pipeline.optimizer.zero_grad()
        assert backwards(monkeypatch, pipeline, batch) == 2
        found = pipeline.gradients()
    plain = Reference(made)
    plain.loss(batch).backward()
    wanted = {name: each.grad for name, each in plain.model.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    assert max((found[name] - wanted[name]).abs().max() for name in wanted) < 1e-14
