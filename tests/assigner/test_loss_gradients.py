"""Losses that take gradients by themselves, of one output by another: whole ones, or a refusal."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.autograd.graph import get_gradient_edge
from workloads import WIDTH, Reference, make_plan, numbers, pipeline_of, workload

from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.profiler.partitionbench import Workbench
from assigner.profiler.tasks import Point
from assigner.profiler.walk import collect_inputs
from assigner.verification.checking import check_model

MISSING = "that part of the gradient would be missing"
PARTS = ("a", "b", "c")


class Sine(nn.Linear):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(WIDTH, width)

    def forward(self, x):
        return super().forward(x).sin()


class Tail(nn.Module):
    """A last partition that makes one of its results of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, h):
        u = self.inner(h)
        return self.outer(u.sin()), u


class Viewed(Tail):
    def forward(self, h):
        u = (2 * self.inner(h)).view(-1, 2, WIDTH // 2)
        return self.outer(u.sin().flatten(1)), u


class Given(Tail):
    """Gives back what it is given."""

    def forward(self, h):
        return super().forward(h)[0], h


class Weighted(Tail):
    def forward(self, h):
        return super().forward(h)[0], self.outer.weight


class Coordinates(Tail):
    """Makes coordinates of its own, beside what it reads of others and of the batch."""

    def forward(self, h, x):
        u = x.clone().detach().requires_grad_()
        return super().forward(u)[0] * h.sum(1, keepdim=True), u


class Detached(Coordinates):
    """They lie in the memory of what it reads."""

    def forward(self, h, x):
        u = h.detach().requires_grad_()
        return super(Coordinates, self).forward(u)[0] * x.sum(1, keepdim=True), u


class Chain(nn.Module):
    """Three parts."""

    def __init__(self, last=Tail) -> None:
        super().__init__()
        self.a, self.b, self.c = Sine(), Sine(), last()

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Beside(Chain):
    def forward(self, x):
        return self.c(self.b(self.a(x)), x)


class HandedOn(Chain):
    """The last part reads one value, which the model returns as well."""

    def forward(self, x):
        h = self.b(self.a(x))
        return self.c(h)[0], h


class Early(Chain):
    """The last part makes its output of a value that other parts have made of the one that the model returns."""

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h))[0], h


class Started(Chain):
    """The first part makes a leaf, which the model returns as well."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, WIDTH, 1))
        self.a = Leaf()

    def forward(self, x):
        h, leaf = self.a(x)
        return self.c(self.b(h)), leaf


class Leaf(Sine):
    def forward(self, x):
        leaf = x.detach().clone().requires_grad_()
        return super().forward(leaf), leaf


class Skip(Chain):
    """Coordinates that the last part reads, and what other parts have made of them."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, 2 * WIDTH, 1))

    def start(self, x):
        return x.clone().detach().requires_grad_(True)

    def forward(self, x):
        x = self.start(x)
        return self.c(torch.cat([self.b(self.a(x)), x.square()], 1)), x


class Grid(Skip):
    """They are not even of the batch."""

    def start(self, x):
        return torch.linspace(-1, 1, WIDTH, dtype=torch.float64).repeat(x.shape[0], 1).requires_grad_()


class Shaped(Skip):
    """Other parts read of them but the shape and the type."""

    def forward(self, x):
        x = self.start(x)
        h = self.b(self.a(torch.ones_like(x))) + self.b(self.a(x.new_ones(x.shape)))
        return self.c(torch.cat([h, x.square()], 1)), x


class Through(Skip):
    """The last part reads them through others alone."""

    def forward(self, x):
        x = self.start(x)
        h = self.b(self.a(x))
        return self.c(torch.cat([h, h], 1)), x


class Both(nn.Module):
    """Gives what it makes of its input, and what it makes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Sine(), Sine()

    def forward(self, x):
        v = self.one(x)
        return self.two(v), v


class Siblings(Skip):
    """The first part makes one of its results of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Both()

    def forward(self, x):
        u, v = self.a(x)
        return self.c(torch.cat([self.b(u), v], 1)), v


class Tied(Chain):
    """Returns a weight that two of its parts have."""

    def __init__(self) -> None:
        super().__init__(Sine)
        self.c.weight = self.a.weight

    def forward(self, x):
        return super().forward(x), self.c.weight


class Heads(nn.Module):
    """A last partition with results that are not made of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Sine(1), Sine(1)

    def forward(self, h):
        return self.one(h), self.two(h)


def slope(outputs, targets, by=lambda x: x, **more):
    y, x = outputs
    (g,) = torch.autograd.grad(y, [by(x)], torch.ones_like(y), create_graph=True, **more)
    return (y - targets[:, :1]).square().mean() + (0 if g is None else (g.norm(dim=1) - 1).square().mean())


def unused(outputs, targets):
    return slope(outputs, targets, allow_unused=True)


def edge(outputs, targets):
    return slope(outputs, targets, get_gradient_edge)


def sensitivity(outputs, targets):
    """By a weight: linear in the rows, so that the batch's is the mean over micro-batches."""
    y, w = outputs
    (g,) = torch.autograd.grad(y.mean(), w, create_graph=True)
    return (y - targets[:, :1]).square().mean() + (g * torch.arange(1.0, 1 + WIDTH)).sum()


def decay(outputs, targets):
    """By a weight, of that weight alone."""
    y, w = outputs
    (g,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    return (y - targets[:, :1]).square().mean() + g.square().sum()


def hooked(outputs, targets):
    y, x = outputs
    x.register_hook(lambda gradient: gradient / 2)
    return (y - targets[:, :1]).square().mean() + x.square().mean()


def retained(outputs, targets):
    outputs[1].retain_grad()
    return slope(outputs, targets)


def swallowed(outputs, targets):
    try:
        return slope(outputs, targets)
    except (RuntimeError, ValueError):
        return (outputs[0] - targets[:, :1]).square().mean()


def weighed(outputs, targets):
    """By one of two results, of a sum in which both are."""
    one, two = outputs
    loss = (one - targets[:, :1]).square().sum() + (two * one.detach()).square().sum()
    (g,) = torch.autograd.grad(loss, one, create_graph=True)
    return loss / len(one) + g.square().mean()


def noded(outputs, targets):
    """Hooks on to the node that has made an output."""
    y, x = outputs
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] / 2,))
    return (y - targets[:, :1]).square().mean() + x.square().mean()


def noded_behind(outputs, targets):
    y, x = outputs
    x.grad_fn.register_hook(lambda given, _: tuple(None if each is None else each / 2 for each in given))
    return (y - targets[:, :1]).square().mean() + x.square().mean()


def looking(outputs, targets):
    """At what a backward of its own has left in the gradient of an output, if that is a leaf."""
    y, x = outputs
    y.square().sum().backward(retain_graph=True)
    return (y - targets[:, :1]).square().sum() * (1 if x.grad is None else 1 + x.grad.square().sum())


MODELS = {
    "chain": Chain,
    "viewed": partial(Chain, Viewed),
    "detached": partial(Beside, Detached),
    "given": partial(Chain, Given),
    "weighted": partial(Chain, Weighted),
    "coordinates": partial(Beside, Coordinates),
    "handed on": HandedOn,
    "early": Early,
    "skip": Skip,
    "grid": Grid,
    "shaped": Shaped,
    "through": Through,
    "siblings": Siblings,
    "tied": Tied,
    "heads": partial(Chain, Heads),
    "started": Started,
}  # each one object: it is captured once

in_all_ways = pytest.mark.parametrize(
    ("micro_batches", "remat"), sweep([(1, ()), (2, ()), (1, PARTS), (2, PARTS)], quick=[(1, ()), (2, PARTS)])
)


made_inputs = pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's tracer reads of each input


def is_as_plain(made, **plan):
    """Two steps give the losses and gradients of plain training; by the second one, partitions may be joined."""
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, **plan)) as pipeline:
        for seed in (1, 2):
            batch = made.make_batch(8, seed=seed)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-10)
            assert reference.gradient_distance(pipeline.gradients()) < 1e-10


def is_refused(made, message=MISSING, **plan):
    with pipeline_of(made, make_plan(made, **plan)) as pipeline, pytest.raises(UsageError, match=message):
        pipeline.step(made.make_batch(8, seed=1))


@in_all_ways
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("skip", slope), ("skip", unused), ("skip", edge), ("skip", retained), ("skip", swallowed),
        ("grid", slope), ("through", slope), ("through", unused), ("siblings", slope), ("early", unused),
        ("tied", sensitivity), ("handed on", hooked), ("given", hooked), ("given", retained),
        ("handed on", noded_behind), ("given", noded_behind),
    ],
)  # fmt: skip
def test_a_part_of_a_gradient_is_refused(model, loss, micro_batches, remat):
    """What other partitions have made of what it is taken by is not in the graph of the last; no hook sees it."""
    is_refused(workload(MODELS[model], *PARTS, loss=loss), micro_batches=micro_batches, remat=remat)


@in_all_ways
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("chain", slope), ("chain", edge), ("chain", hooked), ("chain", retained), ("viewed", slope),
        ("coordinates", slope), ("coordinates", hooked), ("detached", slope), ("shaped", slope), ("given", slope),
        ("handed on", slope), ("handed on", edge),
        ("chain", noded), ("chain", noded_behind), ("handed on", noded),
        ("weighted", sensitivity), ("weighted", decay), ("tied", decay), ("heads", weighed),
    ],
)  # fmt: skip
def test_a_whole_gradient_is_taken(model, loss, micro_batches, remat):
    """Where all that lies between is in the last partition."""
    is_as_plain(workload(MODELS[model], *PARTS, loss=loss), micro_batches=micro_batches, remat=remat)


def test_a_whole_gradient_by_what_another_stage_has_made():
    """The last partition's graph begins with it in every step."""
    made = workload(HandedOn, *PARTS, loss=slope)
    is_as_plain(made, stages=[(0, PARTS[:2]), (0, PARTS[2:])], micro_batches=2)


def wanting(rows, generator):
    """A batch whose inputs require a gradient, and are among its targets."""
    x, targets = numbers(rows, generator)
    return x.requires_grad_(), (x, targets)


def by_batch(y, targets):
    return unused((y, targets[0]), targets[1])


def turned(rows, generator):
    """What the model is given is made of a tensor that is among the targets."""
    (x, targets) = wanting(rows, generator)
    return (-x,), targets


def layers() -> nn.Module:
    return nn.Sequential(Sine(), nn.Linear(WIDTH, 1))


@in_all_ways
def test_a_part_of_a_gradient_by_the_batch_is_refused(micro_batches, remat):
    """The loss has the tensor, and other partitions have made something of it."""
    made = workload(layers, "0", "1", batch=wanting, loss=by_batch)
    is_refused(made, "a tensor of the batch.*" + MISSING, micro_batches=micro_batches, remat=remat and ("0", "1"))


def test_a_whole_gradient_by_the_batch():
    """One partition, and the batch as it is."""
    made = workload(lambda: nn.Sequential(layers()), "0", batch=wanting, loss=by_batch)
    is_as_plain(made, micro_batches=1)
    is_as_plain(made, micro_batches=1, remat=("0",))


@made_inputs
def test_a_gradient_by_what_the_script_has_made_the_input_of():
    """It goes on in the script's graph, where the batch was not cut; and where it was, a part would be missing."""
    made = workload(lambda: nn.Sequential(layers()), "0", batch=turned, loss=by_batch)
    is_as_plain(made, micro_batches=1)
    is_as_plain(made, micro_batches=1, remat=("0",))
    is_refused(made, "in the cutting of the batch into micro-batches: " + MISSING, micro_batches=2)
    made = workload(Alone, "all", batch=partial(related, torch.neg, lambda x: x), loss=unused)
    is_as_plain(made, micro_batches=1)
    is_as_plain(made, micro_batches=1, remat=("all",))
    is_refused(made, "in the cutting of the batch into micro-batches: " + MISSING, micro_batches=2)
    made = workload(layers, "0", "1", batch=turned, loss=by_batch)
    is_refused(made, "a tensor of the batch.*" + MISSING, micro_batches=1)


def twice(rows, generator):
    """Two targets that are one tensor, of which the loss makes something."""
    x, targets = numbers(rows, generator)
    x.requires_grad_()
    return x.detach(), (x, -x, targets)


def by_target(y, targets):
    x, other, wanted = targets
    (g,) = torch.autograd.grad(other.square().sum(), x, create_graph=True, allow_unused=True)
    return (y - wanted[:, :1]).square().mean() * (1 if g is None else g.square().mean())


@made_inputs
def test_a_gradient_by_a_target_of_which_another_one_was_made():
    """Targets are given as copies, behind which the script's graph goes on; but not from one cut to another."""
    made = workload(lambda: nn.Sequential(layers()), "0", batch=twice, loss=by_target)
    is_as_plain(made, micro_batches=1)
    is_refused(made, "a tensor of the batch.*" + MISSING, micro_batches=2)


def test_a_gradient_by_the_batch_is_measured():
    """A profile's loss has the tensor that the partition reads, too; torch would say that it had not been used."""
    made = workload(lambda: nn.Sequential(layers()), "0", batch=wanting, loss=lambda y, t: slope((y, t[0]), t[1]))
    graph, cpu = partition_graph(made), torch.device("cpu")
    inputs = collect_inputs(made, graph, [4], cpu, budget_bytes=1e9, wanted=["0"])
    workbench = Workbench(made, graph, cpu, graph.build(["0"], cpu), inputs, state_share=0.0, room=lambda: math.inf)
    bench = workbench.measured(Point("0", 4))
    for again in (False, True):
        bench.forward(1, again=again)
        bench.backward(1, again=again)
        assert bench.reads[1][0].grad is not None


def test_a_gradient_by_the_batch_with_one_partition():
    """Micro-batches of a tensor that is given twice are cut out of it twice."""
    made = workload(lambda: nn.Sequential(layers()), "0", batch=wanting, loss=by_batch)
    is_refused(made, "in the cutting of the batch into micro-batches: " + MISSING, micro_batches=2)
    made = workload(Alone, "all", batch=partial(related, lambda x: x, lambda x: x), loss=unused)
    is_refused(made, "in the cutting of the batch into micro-batches: " + MISSING, micro_batches=2)
    is_as_plain(made, micro_batches=1)


def test_a_loss_over_the_batch():
    """Its graph ends at the outputs: one that was made of the other in micro-batches' graphs has no gradient by it."""
    made = replace(workload(MODELS["heads"], *PARTS, loss=weighed), loss_over="batch")
    is_as_plain(made, micro_batches=2)
    made = replace(workload(Chain, *PARTS, loss=slope), loss_over="batch")
    is_refused(made, "graphs of micro-batches.*" + MISSING, micro_batches=2)


class Pair(Chain):
    """Two inputs: the output is made of one of them, and the other one is returned as it is."""

    def __init__(self) -> None:
        super().__init__(partial(Sine, 1))

    def forward(self, p, q):
        return self.c(self.b(self.a(p))), q


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = Pair()

    def forward(self, p, q):
        return self.all(p, q)


def related(made, of, rows, generator):
    x, targets = numbers(rows, generator)
    x.requires_grad_()
    return (made(x), of(x)), targets


@made_inputs
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, ()), (2, PARTS)])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: 2 * x, lambda x: x.view(-1, WIDTH)])
def test_a_part_of_a_gradient_by_an_input_of_which_another_one_was_made_is_refused(made, micro_batches, remat):
    """The script has made it, as by giving the same tensor twice."""
    given = workload(Pair, *PARTS, batch=partial(related, made, lambda x: x), loss=unused)
    is_refused(given, micro_batches=micro_batches, remat=remat)


@made_inputs
def test_a_gradient_by_an_input_that_was_made_of_another_one():
    """There is none, as of inputs that were made of a third one."""
    for of in (lambda x: x.view(-1, WIDTH), lambda x: x.flip(1)):
        made = workload(Pair, *PARTS, batch=partial(related, lambda x: x, of), loss=unused)
        is_as_plain(made, micro_batches=1)
    made = workload(Pair, *PARTS, batch=partial(related, lambda x: x + 1, lambda x: -x), loss=unused)
    is_as_plain(made, micro_batches=1, remat=PARTS)


def adding(outputs, targets):
    outputs[0].mean().backward(retain_graph=True)
    return (outputs[0] - targets[:, :1]).square().mean()


@pytest.mark.parametrize("model", ["chain", "handed on"])
def test_a_backward_in_the_loss(model):
    """It adds to gradients of the whole batch as in plain torch; what it adds to a micro-batch's is not weighed."""
    made = workload(MODELS[model], *PARTS, loss=adding)
    is_as_plain(made, micro_batches=1)
    is_as_plain(made, micro_batches=1, remat=PARTS)
    is_as_plain(made, stages=[(0, PARTS[:2]), (0, PARTS[2:])], micro_batches=1)
    for remat in ((), PARTS):
        is_refused(made, "counts 0.5 times: .* would count in full", micro_batches=2, remat=remat)


@in_all_ways
def test_the_gradient_of_a_leaf_that_another_partition_has_made_is_refused(micro_batches, remat):
    """In plain torch the loss finds there what its own backward has left."""
    made = workload(MODELS["started"], *PARTS, loss=looking, reduction="sum")
    is_refused(made, r"\(\.grad\) of the model's output\[1\].*" + MISSING, micro_batches=micro_batches, remat=remat)


def adding_sums(outputs, targets):
    outputs[0].sum().backward(retain_graph=True)
    return (outputs[0] - targets[:, :1]).square().sum()


@in_all_ways
def test_a_backward_in_a_loss_that_is_summed(micro_batches, remat):
    """What it adds to a micro-batch's gradients is a part of what it adds to the whole batch's."""
    made = workload(MODELS["chain"], *PARTS, loss=adding_sums, reduction="sum")
    is_as_plain(made, micro_batches=micro_batches, remat=remat)


@made_inputs
def test_a_backward_in_the_loss_that_reaches_an_input():
    """It adds to no `.grad` of what the loss has a copy of."""
    made = workload(Pair, *PARTS, batch=partial(related, torch.clone, lambda x: x), loss=adding)
    is_refused(made, r"\.grad of the model's output\[1\]", micro_batches=1)


def test_a_backward_in_the_loss_from_tensors_of_its_own():
    """It reaches nothing of the model's."""

    def own(outputs, targets):
        u = outputs[1].detach().requires_grad_()
        u.square().mean(1).sum().backward()
        return (outputs[0] - targets[:, :1]).square().mean() + (u.grad * outputs[1]).sum(1).mean()

    is_as_plain(workload(Chain, *PARTS, loss=own), micro_batches=2, remat=PARTS)


class Counting:
    """A loss with a memory."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return slope(outputs, targets) / self.calls


class Listing:
    def __init__(self) -> None:
        self.losses = []

    def __call__(self, outputs, targets):
        self.losses.append(slope(outputs, targets))
        return self.losses[-1] / len(self.losses)


class Drawing:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, outputs, targets):
        return slope(outputs, targets) * torch.rand((), generator=self.generator)


@pytest.mark.parametrize("loss", [Counting, Listing, Drawing])
def test_a_gradient_and_a_memory(loss):
    """Where micro-batches are recomputed last to first, a loss that keeps something cannot wait for that."""
    made = workload(Chain, *PARTS, loss=loss())
    is_refused(made, "takes gradients .* and keeps something", micro_batches=2, remat=PARTS)


def test_a_gradient_in_evaluations_too():
    """There is no graph for it: the check says so and compares the rest, and so does an evaluation."""
    made = workload(Chain, *PARTS, loss=slope)
    found = check_model(made, partition_graph(made))
    assert found.result == "equal"
    assert any("cannot be evaluated: Workload.loss" in each and "is_grad_enabled" in each for each in found.cautions)
    with pipeline_of(made, make_plan(made)) as pipeline, pytest.raises(UsageError, match="gradient in an evaluation"):
        pipeline.evaluate(made.make_batch(8, seed=1))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_batch_that_was_computed_with_a_gradient(micro_batches):
    """One micro-batch goes back through what has computed it, as a plain step does; that several cannot is said."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "0", "1")
    x, y = made.make_batch(8, 0)
    scale = torch.ones(WIDTH, dtype=x.dtype, requires_grad=True)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        if micro_batches == 1:
            pipeline.step(((x * scale).exp(), y))
            assert scale.grad.abs().sum() > 0
        else:
            with pytest.raises(UsageError, match="each of 2 micro-batches goes back through what has computed it"):
                pipeline.step(((x * scale).exp(), y))
        pipeline.step(((x * scale).exp().detach(), y))
