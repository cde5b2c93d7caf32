"""What forwards change on modules goes with a partition that moves, or the move is refused before it begins."""

from __future__ import annotations

import pytest
import torch
from changing_models import Counting, Keeping, Queue, made_of
from torch import nn
from workloads import WIDTH, Reference, graph_of, make_plan, normalised, pipeline_of, recurrent, workload

from assigner.errors import UsageError
from assigner.runtime.relocation import RelocatedState
from assigner.runtime.stages.localpartitions import LocalPartitions

EXACT = 1e-10


@pytest.mark.parametrize("kind", [Counting, Queue, Keeping])
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
    shares = [LocalPartitions(graph, plan, "worker:0/cpu", torch.device("cpu")) for _ in range(2)]
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
