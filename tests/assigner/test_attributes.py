"""What forwards change on modules goes with a partition that moves, or the move is refused before it begins."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import weakref
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from changing_models import Config, Counting, Keeping, Part, Queue, Scored, made_of
from sweeps import sweep
from torch import nn
from workloads import WIDTH, Reference, graph_of, make_plan, normalised, pipeline_of, recurrent, workload

from assigner.errors import UsageError
from assigner.runtime.relocation import RelocatedState
from assigner.runtime.stages.localpartitions import LocalPartitions, UnreadState

EXACT = 1e-10


@pytest.mark.parametrize("kind", [Counting, Queue, Keeping, Scored])
def test_a_move_keeps_what_forwards_have_changed(kind):
    """Losses are the plain model's, though the partitions were built anew in between."""
    made = made_of(kind)
    reference = Reference(made)
    plans = [make_plan(made, stages, micro_batches=1) for stages in ([], [(0, ["first"]), (0, ["middle", "last"])])]
    with pipeline_of(made, plans[0]) as pipeline:
        for n in range(4):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            pipeline.move(plans[(n + 1) % 2])
        assert reference.distance(pipeline.named_parameters()) < EXACT


def test_running_statistics_move_on():
    """BatchNorm's statistics are deferred by the new partition's own means."""
    made = workload(normalised)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            pipeline._installed.share.check_leaving(pipeline.partitions)
            pipeline.move(make_plan(made, micro_batches=1))
        assert reference.distance(pipeline.state_dict().items()) < EXACT


def test_what_travels_arrives():
    """Plain values and tensors of any type are packed; an object that forward has changed does not, and says so."""
    made = made_of(Queue)
    graph = graph_of(made)
    plan = make_plan(made)
    given = graph, plan, "worker:0/cpu", torch.device("cpu"), UnreadState(graph, 0)
    shares = [LocalPartitions(*given) for _ in range(2)]
    layer = shares[0].modules["middle"].get_submodule("middle")
    layer.queue, layer.count, layer.seen = torch.ones(3, dtype=torch.complex128), 4, [1, (2, "x")]
    RelocatedState.unpacked(RelocatedState.of("middle", shares[0]).packed()).unpack("middle", shares[1])
    other = shares[1].modules["middle"].get_submodule("middle")
    assert torch.equal(other.queue, layer.queue)
    assert (other.count, other.seen) == (4, [1, (2, "x")])
    shares[0].check_leaving(["middle"])
    layer.strange = object
    layer.seen.append(layer)
    with pytest.raises(UsageError, match=r"middle\.seen, a list that forward has changed, cannot go"):
        shares[0].check_leaving(["middle"])


def test_an_lstm_may_leave():
    """It lists its own weights a second time, which no forward has changed; another list of tensors may not leave."""
    made = recurrent()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        share = pipeline._installed.share
        assert share.attributes("memory") == {}
        share.check_leaving(pipeline.partitions)
        layer = share.modules["memory"].get_submodule("memory")
        layer._flat_weights = [each.detach().clone() for each in layer._flat_weights]
        with pytest.raises(UsageError, match=r"memory\._flat_weights, a list that forward has changed, cannot go"):
            share.check_leaving(["memory"])


def test_what_the_script_freezes_stays_so_when_it_moves():
    """A parameter that wants no gradient wants none under the next plan, and is not trained there."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        dict(pipeline.named_parameters())["0.weight"].requires_grad_(False)
        frozen = pipeline.full_state_dict()["0.weight"].clone()
        pipeline.move(make_plan(made, micro_batches=2))
        assert [name for name, each in pipeline.named_parameters() if not each.requires_grad] == ["0.weight"]
        pipeline.step(made.make_batch(8, 1))
        assert torch.equal(pipeline.full_state_dict()["0.weight"], frozen)


def test_gradients_to_which_the_next_step_adds_go_along():
    """A loop that drops none, or that drops them at its beginning, trains as without the move."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    found = []
    for moves in (False, True):
        with pipeline_of(made, make_plan(made)) as pipeline:
            for n in range(3):
                if n == 2:
                    pipeline.optimizer.zero_grad()
                pipeline.step(made.make_batch(8, n), update=False)
                pipeline.optimizer.step()
                found.append({name: each.clone() for name, each in pipeline.gradients().items()})
                if moves:
                    pipeline.move(make_plan(made))
    for n in range(3):
        assert all(torch.equal(each, found[n + 3][name]) for name, each in found[n].items())


def test_what_the_script_has_kept_of_an_earlier_plan_is_refused():
    """Nobody trains it any more: it is not to be read, written or frozen; its shape is told."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)))
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        kept, mean = dict(pipeline.named_parameters())["0.weight"], pipeline.state_dict()["1.running_mean"]
        kept.detach().clamp_(-1, 1)
        pipeline.move(make_plan(made, micro_batches=2))
        assert (kept.shape, mean.shape) == ((WIDTH, WIDTH), (WIDTH,))
        for use in (
            lambda: kept.clamp_(-1, 1),
            lambda: kept.data,
            lambda: kept.copy_(torch.zeros(WIDTH, WIDTH)),
            lambda: kept.requires_grad_(False),
            lambda: setattr(kept, "requires_grad", False),
            lambda: kept.grad,
            lambda: kept.register_hook(print),
            mean.sum,
        ):
            with torch.no_grad(), pytest.raises(UsageError, match="as it had it before"):
                use()
        pipeline.step(made.make_batch(8, 1))
        dict(pipeline.named_parameters())["0.weight"].detach().clamp_(-1, 1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda weight, _: weight.data.view(-1), r"memory of 0\.weight from"),
        (lambda weight, _: weight.detach().numpy(), r"memory of 0\.weight from"),
        (lambda weight, _: (weight, weight[:1]), r"memory of 0\.weight from"),
        (lambda weight, _: weight, ""),  # refused where it is used
        (lambda weight, optimizer: (weight.grad, optimizer.state, optimizer.state[weight]["exp_avg"]), ""),  # stay
        (lambda _, optimizer: (optimizer.param_groups, optimizer.state_dict()), ""),
        (lambda weight, _: weight.detach().clone(), ""),
    ],
)
def test_memory_of_an_earlier_plan_that_the_script_holds_is_told(keep, words):
    """An alias of a weight knows nothing of it; what goes along, or is a copy, is told of no more than nothing."""
    made = replace(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))), optimizer=adam)
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0), update=False)
        pipeline.optimizer.step()
        kept = keep(dict(pipeline.named_parameters())["0.weight"], pipeline.optimizer)
        with pytest.warns(match=words) if words else contextlib.nullcontext():  # others are errors
            pipeline.move(make_plan(made, micro_batches=2))
        del kept
        pipeline.move(make_plan(made))


@pytest.mark.parametrize("plans", [1, 2])
def test_ordinary_loops_hold_no_memory_of_an_earlier_plan(plans):
    """A warning that always comes says nothing: here each would be an error. Gradients and moments are the same."""
    made, losses = replace(workload(normalised), optimizer=adam), []
    stages = [make_plan(made, micro_batches=n + 1) for n in range(plans)]
    with pipeline_of(made, stages[0]) as pipeline:
        scheduler = torch.optim.lr_scheduler.StepLR(pipeline.optimizer, 2, gamma=0.5)
        state, average = pipeline.optimizer.state, {}
        for n in range(4):
            if n % 2:
                losses.append(pipeline.step(made.make_batch(8, n), max_norm=1.0))
            else:
                pipeline.step(made.make_batch(8, n), update=False)
                for _, parameter in pipeline.named_parameters():
                    parameter.grad.clamp_(-1, 1)
                pipeline.optimizer.step()
                pipeline.optimizer.zero_grad(set_to_none=False)
            for moments in state.values():
                moments["exp_avg"].mul_(0.5)
            for name, parameter in pipeline.named_parameters():
                average[name] = average.get(name, 0) * 0.9 + parameter.detach() * 0.1
            scheduler.step()
            pipeline.evaluate(made.make_batch(8, n))
            weights = pipeline.full_state_dict()
            pipeline.move(stages[n % plans])
            assert state is pipeline.optimizer.state
            assert len(state) == len(list(pipeline.named_parameters()))
        pipeline.load_state_dict(weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "words"),
    [
        (
            lambda weight: weight.register_hook(lambda gradient: gradient * 0),
            "registered or removed a hook on '0.weight'",
        ),
        (lambda weight: setattr(weight, "scale", 3), "set the attribute 'scale' of '0.weight'"),
    ],
)
def test_what_the_script_hangs_on_a_parameter_does_not_vanish_in_a_move(hang, words):
    """The new plan's parameter is another tensor: the move is refused, and the old plan goes on."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    with pipeline_of(made, make_plan(made)) as pipeline:
        hang(dict(pipeline.named_parameters())["0.weight"])
        with pytest.raises(UsageError, match=words):
            pipeline.move(make_plan(made, micro_batches=2))
        pipeline.step(made.make_batch(8, 1))


class Phase(enum.Enum):
    """Its members are objects of the script's."""

    EARLY, LATE = "early", "late"


def double(*given):
    """A hook."""
    return given[-1] * 2


THREE, ONE = torch.tensor(3.0), torch.tensor(1.0)


def weighted(weight, _module, _given, y):
    """Another one."""
    return y * weight


class Held(Part):
    """Has attributes, submodules and hooks of all kinds, and changes one of them in its second forward."""

    def __init__(self, change=lambda _: None):
        super().__init__()
        self.calls, self.change = 0, change
        self.number, self.fraction, self.text, self.span = np.float64(1.0), Fraction(1), "text", range(3)
        self.phase, self.type, self.place = Phase.EARLY, torch.float32, torch.device("cpu")
        self.act, self.late = torch.tanh, functools.partial(torch.mul, other=2.0)
        self.parent, self.note, self.scaled = weakref.ref(self), [].append, lambda x: x * self.number
        self.called, self.method, self.ring = {"act": torch.tanh}, self.scale, Config()
        self.ring.next = self.ring
        self.acts = nn.ModuleList([nn.Tanh(), nn.Identity()])
        self.twins = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.times = functools.partial(torch.mul, THREE)
        self.twins[1].register_forward_hook(functools.partial(weighted, ONE))
        self.handle = self.inner.register_forward_hook(double)
        self.inner.register_forward_hook(lambda *given: given[-1] * self.number)

    def scale(self, x):
        return x * 2

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.change(self)
        return self.times(self.twins[0](self.inner(x))) + self.twins[1](x)


def moved(change, kind=Held):
    """What a move of a partition with such a module says to another worker, or on this one."""
    made = made_of(lambda: kind(change))
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n in range(2):
            pipeline.step(made.make_batch(8, n))
        share = pipeline._installed.share
        try:
            share.check_rebuilt()
            share.check_leaving(["middle"])
        except UsageError as error:
            return error.message, share.attributes("middle")
        pipeline.move(make_plan(made, micro_batches=1))
        return "", share.attributes("middle")


class Logging(Held):
    """Has a stream, which Python neither compares nor reads once it is closed."""

    def __init__(self, change=lambda _: None):
        super().__init__(change)
        self.log = io.StringIO()


def test_a_stream_that_a_forward_has_closed_cannot_leave():
    """It is told from the builder's, which is open."""
    said, changed = moved(lambda s: s.log.close(), Logging)
    assert "middle.log, a StringIO that forward has changed" in said
    assert "middle.log" in changed


class Pickled(Held):
    """Has a way of its own to be copied, without one of its attributes."""

    def __init__(self, change=lambda _: None):
        super().__init__(change)
        self.cache = {}

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}


@pytest.mark.long
def test_what_a_forward_deletes_is_missed_where_a_module_has_its_own_way_to_be_copied():
    """What copies of it have never had is not."""
    assert moved(lambda _: None, Pickled) == ("", {"middle.calls": 2})
    assert "deleted middle.text" in moved(lambda s: delattr(s, "text"), Pickled)[0]


@pytest.mark.long
def test_what_forwards_leave_alone_is_the_same():
    """Copies of functions, methods, closures, partials, weak references and cycles are no changes."""
    assert moved(lambda _: None) == ("", {"middle.calls": 2})


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    sweep([
        (lambda s: setattr(s, "fraction", s.fraction / 2), "middle.fraction, a Fraction that forward has changed"),
        (lambda s: setattr(s, "span", range(4)), "middle.span, a range that forward has changed"),
        (lambda s: setattr(s, "phase", Phase.LATE), "middle.phase, a Phase that forward has changed"),
        (lambda s: setattr(s, "act", torch.relu), "middle.act, a builtin_function_or_method that forward has"),
        (lambda s: setattr(s, "late", functools.partial(torch.mul, other=3.0)), "middle.late, a partial that"),
        (lambda s: s.times.args[0].zero_(), "middle.times, a partial that forward has changed"),
        (lambda s: s.called.update(act=torch.relu), "middle.called, a dict that forward has changed"),
        (lambda s: setattr(s, "scaled", double), "middle.scaled, a function that forward has changed"),
        (lambda s: setattr(s, "forward", s.scale), "set middle.forward to a method that leads to the partition's own"),
        (lambda s: setattr(s, "flat", [*s.inner.parameters()]), "set middle.flat to a list with the partition's own"),
        (lambda s: vars(s).update(alias=s.inner.weight), "set middle.alias to a Parameter with the partition's own"),
        (lambda s: setattr(s, "kept", double), "middle.kept, a function that forward has changed"),
        (lambda s: delattr(s, "act"), "deleted middle.act"),
        (lambda s: setattr(s, "new", nn.Tanh()), "put another module in the place of middle.new, or"),
        (lambda s: s.acts.__setitem__(0, nn.ReLU()), "put another module in the place of middle.acts.0, or"),
        (lambda s: s.acts.pop(-1), "put another module in the place of middle.acts.1, or"),
        (lambda s: s.twins.__setitem__(0, nn.Linear(WIDTH, WIDTH).double()), "place of 'middle.twins.0.weight'"),
        (lambda s: s.handle.remove(), "a hook of middle.inner"),
        (lambda s: s.twins[0].register_forward_hook(double), "a hook of middle.twins.0"),
    ], quick=1),
)  # fmt: skip
def test_what_a_partition_that_is_built_anew_would_not_have_is_refused(change, words):
    """Nothing that forwards have changed is lost in silence."""
    assert words in moved(change)[0]


@pytest.mark.long
def test_numbers_of_numpys_and_types_go_along():
    """The number is a float, too."""

    def change(s: Held) -> None:
        s.number, s.type = s.number * 0.5, torch.float16

    said, changed = moved(change)
    assert (said, changed["middle.number"], changed["middle.type"]) == ("", 0.5, torch.float16)
