import json
from dataclasses import replace

import pytest
import torch
from builders import make_plan, make_profile
from torch import nn

from assigner.errors import FormatError
from assigner.export import device_map
from assigner.holding import Holding
from assigner.marking import partition_graph
from assigner.marking.holding import held_names
from assigner.profile import Tie
from assigner.workload import Workload

NAMES = [f"p{n}" for n in range(4)]


def on_one_host(devices, **changes):
    """A profile of four partitions whose workers are the given devices of one host, and a plan in halves."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0] * len(devices))
    workers = tuple(
        replace(worker, host="here", device=device, **changes)
        for worker, device in zip(profile.workers, devices, strict=True)
    )
    return replace(profile, workers=workers), make_plan(profile, [(0, NAMES[:2]), (1, NAMES[2:])])


class Net(nn.Module):
    """Marked blocks, an unmarked norm between them, a lone parameter, and a layer that the forward never uses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(self.blocks[0](x)) * self.scale
        return self.blocks[1](x)


@pytest.fixture(scope="module")
def held():
    """What the partitions of Net hold."""
    workload = Workload(
        model=Net, batch=lambda rows, generator: (torch.randn(rows, 4, generator=generator), None),
        batch_size=4, marks=("blocks.*",),
    )  # fmt: skip
    return held_names(partition_graph(workload))


def test_partitions_go_where_the_plan_has_them():
    """One entry a partition, in the plan's order, and what else the model has under ""."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    made = device_map(plan, profile)
    assert json.loads(made.text) == {"p0": "cuda:0", "p1": "cuda:0", "p2": "cuda:1", "p3": "cuda:1", "": "cuda:0"}
    assert "--workload" in made.notes[0]


def test_several_hosts_are_refused():
    """A device map is for one process; the hint solves for one host."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    with pytest.raises(FormatError, match="are on 2: host0, host1") as caught:
        device_map(make_plan(profile, [(0, NAMES[:2]), (1, NAMES[2:])]), profile)
    assert "--only host0" in caught.value.hint


def test_gpus_that_cannot_be_told_apart_are_refused():
    """Ranks that each saw one GPU call it cuda:0, whichever it is."""
    profile, plan = on_one_host(["cuda:0", "cuda:0"])
    with pytest.raises(FormatError, match="worker:0/cpu and worker:1/cpu are all cuda:0"):
        device_map(plan, profile)


@pytest.mark.parametrize(
    ("devices", "word"), [(["cpu", "cpu"], "2 CPU workers"), (["cuda:0", "cpu"], "computed on cuda:0")]
)
def test_what_accelerate_does_otherwise_is_noted(devices, word):
    """CPU ranks become one device, and beside a GPU the CPU only stores."""
    profile, plan = on_one_host(devices)
    assert word in device_map(plan, profile).notes[-1]


def test_shared_parameters_on_several_devices_are_noted():
    """accelerate warns of them; on one device there is nothing to say."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    for partitions, said in ((("p0", "p3"), True), (("p0", "p1"), False)):
        tied = replace(profile, ties=(Tie("word.weight", partitions, 1e3),))
        assert any("word.weight" in note for note in device_map(plan, tied).notes) is said


def test_held_names_cover_the_model(held):
    """Unmarked modules and lone parameters are with the partition that runs them; what nothing uses is under ""."""
    assert held["blocks.0"] == Holding(("blocks.0", "norm"), ("scale",))
    assert held["blocks.1"] == Holding(("blocks.1",))
    assert held[""] == Holding((), ("spare.weight", "spare.bias"))


def test_accelerate_takes_the_map(held):
    """accelerate's own check finds every parameter covered, and the model computes the same under the map's hooks."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.modeling import check_device_map

    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    stages = tuple(replace(stage, partitions=(f"blocks.{n}",)) for n, stage in enumerate(plan.stages))
    plan = replace(plan, stages=stages)
    profile = replace(
        profile, partitions=tuple(replace(profile.partitions[n], name=f"blocks.{n}") for n in range(2)),
        edges=(), measurements=tuple(replace(profile.measurements[0], partition=f"blocks.{n}") for n in range(2)),
    )  # fmt: skip
    for given in (None, held):
        made = device_map(plan, profile, given).data
        assert made["blocks.1"] == "cuda:1"
        check_device_map(Net(), made)
        model, x = Net(), torch.randn(3, 4)
        expected = model(x)
        here = accelerate.dispatch_model(model, dict.fromkeys(made, "cpu"), force_hooks=True)
        torch.testing.assert_close(here(x), expected)
    exact = device_map(plan, profile, {**held, "": Holding(())}).data
    exact.pop("")
    with pytest.raises(ValueError, match=r"spare\.weight"):
        check_device_map(Net(), exact)


def test_a_module_that_two_partitions_hold_is_mapped_once():
    """The first of them says where."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    made = device_map(plan, profile, {"": Holding(()), **{name: Holding((name, "rope")) for name in NAMES}})
    assert made.data["rope"] == "cuda:0"
    assert made.notes == ()
