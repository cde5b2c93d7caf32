import json
from dataclasses import replace

import pytest
import torch
from builders import make_plan, make_profile, on_devices
from torch import nn

from assigner.errors import UsageError
from assigner.export.device_map import device_map
from assigner.export.exported import PartitionContent
from assigner.formats.profile import Tie
from assigner.model.marking import partition_graph
from assigner.model.workload import Workload

NAMES = [f"p{n}" for n in range(4)]


def on_one_host(devices, **changes):
    """A profile of four partitions whose workers are the given devices of one host, and a plan in halves."""
    profile = on_devices(make_profile(work=[1e-3] * 4, slowness=[1.0] * len(devices)), devices)
    profile = replace(profile, workers=tuple(replace(worker, host="here", **changes) for worker in profile.workers))
    return profile, make_plan(profile, [(0, NAMES[:2]), (1, NAMES[2:])])


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
    return partition_graph(workload).content


def test_partitions_go_where_the_plan_has_them():
    """One entry a partition, in the plan's order, and what else the model has under ""."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    made = device_map(plan, profile)
    assert json.loads(made.text) == {"p0": "cuda:0", "p1": "cuda:0", "p2": "cuda:1", "p3": "cuda:1", "": "cuda:0"}
    assert "--workload" in made.notes[0]


def test_what_stands_for_the_rest_is_never_left_on_the_cpu():
    """accelerate cannot offload a model as a whole and place parts of it on a GPU."""
    profile, plan = on_one_host(["cpu", "cuda:0"])
    made = device_map(plan, profile)
    assert (made.data["p0"], made.data["p2"], made.data[""]) == ("cpu", "cuda:0", "cuda:0")
    held = {
        "": PartitionContent(()),
        **{name: PartitionContent((f"{name[0]}.{name}",), (f"{name[0]}.scale",)) for name in NAMES},
    }
    assert device_map(plan, profile, held).data["p"] == "cuda:0"


def test_accelerate_takes_a_map_that_begins_on_the_cpu(tmp_path):
    """In accelerate's terms without a GPU: "disk" for what is only kept, "cpu" for what computes; the values agree."""
    accelerate = pytest.importorskip("accelerate")
    profile, plan = on_one_host(["cpu", "cuda:0"])
    model, x = nn.ModuleDict({name: nn.Linear(2, 2) for name in NAMES}), torch.randn(3, 2)
    model.register_parameter("scale", nn.Parameter(torch.full((2,), 3.0)))
    model.forward = lambda x: model["p3"](model["p2"](model["p1"](model["p0"](x)))) * model.scale
    expected = model(x)
    terms = {"cpu": "disk", "cuda:0": "cpu"}
    made = {name: terms[device] for name, device in device_map(plan, profile).data.items()}
    torch.testing.assert_close(accelerate.dispatch_model(model, made, offload_dir=tmp_path)(x), expected)


def test_what_accelerate_puts_on_one_device_at_first_is_noted():
    """An entry for a module around others moves all of it there: the bytes are said, shared ones once."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    parts = tuple(replace(each, parameter_bytes=2**20, buffer_bytes=0) for each in profile.partitions)
    profile = replace(profile, partitions=parts, ties=(Tie("p0.weight", ("p0", "p3"), 2**20),))
    said = 'accelerate puts the whole model on cuda:0 at first, for the entry "": 3.00 MiB'
    assert f'{said}; dispatch_model(..., main_device="cuda:0") makes it that one' in device_map(plan, profile).notes
    beside, other = on_one_host(["cuda:0", "cpu"])
    assert said in device_map(other, replace(beside, partitions=parts, ties=profile.ties)).notes
    held = {"": PartitionContent(()), **{name: PartitionContent((f"net.{name}",)) for name in NAMES}}
    assert not any("at first" in note for note in device_map(plan, profile, held).notes)
    held["p0"] = PartitionContent(("net.p0",), ("net.position",))
    assert any("all of net on cuda:0 at first" in note for note in device_map(plan, profile, held).notes)


def test_what_does_not_fit_at_first_is_refused():
    """The model is larger than the device of the rest; named modules need no such entry."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"], memory_bytes=3 * 2**20, reserve_bytes=0)
    parts = tuple(replace(each, parameter_bytes=2**20, buffer_bytes=0) for each in profile.partitions)
    profile = replace(profile, partitions=parts)
    with pytest.raises(UsageError, match="the whole model on cuda:0 at first") as caught:
        device_map(plan, profile)
    assert "--workload" in caught.value.hint
    held = {"": PartitionContent(()), **{name: PartitionContent((name,)) for name in NAMES}}
    assert list(device_map(plan, profile, held).data) == NAMES
    with pytest.raises(UsageError, match='for the entry ""') as caught:
        device_map(plan, profile, {**held, "p0": PartitionContent(("p0",), ("position",))})
    assert "a module of their own" in caught.value.hint


class Joining(nn.Module):
    """A sum outside of modules, of what two partitions made."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.a(x)
        return x + self.b(x)


def test_values_of_two_devices_that_meet_are_noted():
    """What accelerate refuses as it runs is said before, for just the partition that does it."""
    accelerate = pytest.importorskip("accelerate")
    workload = Workload(
        model=Joining, batch=lambda rows, generator: (torch.randn(rows, 2, generator=generator), None),
        batch_size=4, marks=("a", "b"),
    )  # fmt: skip
    held = partition_graph(workload).content
    assert (held["a"].meetings, held["b"].meetings) == ((), (frozenset("ab"),))
    with pytest.raises(RuntimeError, match="device"):
        accelerate.dispatch_model(Joining(), {"a": "cpu", "b": "meta"}, main_device="cpu")(torch.ones(1, 2))
    named = dict(zip(NAMES, ("a", "a.1", "b", "b.1"), strict=True))
    known = {**held, "a.1": PartitionContent(("a.1",)), "b.1": PartitionContent(("b.1",))}
    for devices, said in ((["cuda:0", "cuda:1"], True), (["cpu", "cpu"], False), (["cpu", "cuda:0"], False)):
        profile, plan = renamed(*on_one_host(devices), named)
        notes = [note for note in device_map(plan, profile, known).notes if "joins" in note]
        assert bool(notes) is said
        assert not said or notes[0].startswith("b: the forward itself joins values from cuda:0 and cuda:1")


def test_without_the_model_a_reader_of_two_devices_is_noted():
    """Whether the values meet in a module is not known."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    assert not any("come together" in note for note in device_map(plan, profile).notes)
    skip = replace(profile, edges=(*profile.edges, replace(profile.edges[0], target="p3")))
    assert any(note.startswith("p3: values from cuda:0 and cuda:1") for note in device_map(plan, skip).notes)


def renamed(profile, plan, names):
    """The same with other names of partitions."""
    profile = replace(
        profile,
        partitions=tuple(replace(each, name=names[each.name]) for each in profile.partitions),
        edges=tuple(replace(each, source=names[each.source], target=names[each.target]) for each in profile.edges),
        measurements=tuple(replace(each, partition=names[each.partition]) for each in profile.measurements),
    )
    stages = tuple(replace(stage, partitions=tuple(names[each] for each in stage.partitions)) for stage in plan.stages)
    return profile, replace(plan, stages=stages)


def test_several_hosts_are_refused():
    """A device map is for one process; the hint solves for one host."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    with pytest.raises(UsageError, match="are on 2: host0, host1") as caught:
        device_map(make_plan(profile, [(0, NAMES[:2]), (1, NAMES[2:])]), profile)
    assert "--only host0" in caught.value.hint


def test_gpus_that_cannot_be_told_apart_are_refused():
    """Ranks that each saw one GPU call it cuda:0, whichever it is."""
    profile, plan = on_one_host(["cuda:0", "cuda:0"])
    with pytest.raises(UsageError, match="worker:0/cuda:0 and worker:1/cuda:0 are all cuda:0"):
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
    assert held["blocks.0"] == PartitionContent(("blocks.0", "norm"), ("scale",))
    assert held["blocks.1"] == PartitionContent(("blocks.1",))
    assert held[""] == PartitionContent((), ("spare.weight", "spare.bias"))


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
    exact = device_map(plan, profile, {**held, "": PartitionContent(())}).data
    exact.pop("")
    with pytest.raises(ValueError, match=r"spare\.weight"):
        check_device_map(Net(), exact)


def test_a_module_that_two_partitions_hold_is_mapped_once():
    """The first of them says where."""
    profile, plan = on_one_host(["cuda:0", "cuda:1"])
    made = device_map(
        plan, profile, {"": PartitionContent(()), **{name: PartitionContent((name, "rope")) for name in NAMES}}
    )
    assert made.data["rope"] == "cuda:0"
    assert made.notes == ()
