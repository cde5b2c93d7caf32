import json
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from builders import make_plan, make_profile
from torch import nn

from assigner.errors import UsageError
from assigner.export.torchgpipe import balance
from assigner.formats.profile import Tie

NAMES = [f"p{n}" for n in range(5)]


@pytest.fixture
def profile():
    """Five partitions in a chain, on three CPU workers of one host."""
    made = make_profile(work=[1e-3] * 5, slowness=[1.0] * 3)
    return replace(made, workers=tuple(replace(worker, host="here") for worker in made.workers))


def cut(profile, *sizes):
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return make_plan(
        profile, [(n, NAMES[end - size : end]) for n, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    )


def test_arguments(profile):
    """Layers per stage, the stages' devices, micro-batches, and rematerialisation for all or none."""
    made = balance(cut(profile, 2, 2, 1), profile)
    expected = {"balance": [2, 2, 1], "devices": ["cpu", "cpu", "cpu"], "chunks": 4, "checkpoint": "never"}
    assert json.loads(made.text) == expected
    model, note = made.notes
    assert model.endswith("an nn.Sequential with exactly 5 children, in this order: p0-4 (5)")
    assert "3 CPU workers" in note


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_torchgpipe_takes_them(profile):
    """The real GPipe cuts a Sequential of the partitions where the plan does, and trains it."""
    torchgpipe = pytest.importorskip("torchgpipe")
    plan = cut(profile, 1, 3, 1)
    arguments = json.loads(balance(plan, profile).text)
    model = torchgpipe.GPipe(nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in NAMES)), **arguments)
    assert [tuple(dict(part.named_children())) for part in model.partitions] == [s.partitions for s in plan.stages]
    model(torch.randn(8, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_skips_are_refused(profile):
    """A Sequential has no way past a layer."""
    skipping = replace(profile, edges=(*profile.edges, replace(profile.edges[0], target="p3")))
    with pytest.raises(UsageError, match="'p3' reads a value of 'p0'") as caught:
        balance(cut(skipping, 3, 2), skipping)
    assert "--to dot" in caught.value.hint


def test_shared_parameters_are_refused(profile):
    """torchgpipe keeps no two copies of a parameter alike."""
    tied = replace(profile, ties=(Tie("word.weight", ("p0", "p4"), 1e3),))
    with pytest.raises(UsageError, match=r"p0 and p4 share 'word\.weight'"):
        balance(cut(tied, 3, 2), tied)


def test_several_stages_of_one_worker_are_refused(profile):
    """Each device has one run of layers."""
    plan = replace(make_plan(profile, [(0, NAMES[:2]), (1, NAMES[2:4]), (0, NAMES[4:])]), schedule="interleaved")
    with pytest.raises(UsageError, match="worker:0/cpu has several stages"):
        balance(plan, profile)


def test_what_torchgpipe_does_otherwise_is_noted(profile):
    """It has one schedule, and rematerialises everything or nothing."""
    plan = cut(profile, 3, 2)
    plan = replace(plan, schedule="1f1b", stages=(replace(plan.stages[0], rematerialise=("p1",)), plan.stages[1]))
    made = balance(plan, profile)
    assert made.data["checkpoint"] == "always"
    assert [word in note for word, note in zip(("1f1b", "1 of 5"), made.notes[1:], strict=False)] == [True, True]
