"""Profiles and plans refuse what is not consistent, and keep what is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.document import encode
from assigner.errors import FormatError
from assigner.graph import topological_order
from assigner.location import Location
from assigner.plan import Stage, load_plan, save_plan
from assigner.profile import Edge, LinkPoint, Tie, load_profile, save_profile

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0])


def test_files_give_back_what_was_written(tmp_path) -> None:
    """A profile and a plan read from their files equal those that were written."""
    plan = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    save_profile(PROFILE, tmp_path / "profile.json")
    save_plan(plan, tmp_path / "plan.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE
    assert load_plan(tmp_path / "plan.json") == plan


def test_kind_and_version_come_first(tmp_path) -> None:
    """The first two fields of a file say what it is."""
    save_profile(PROFILE, tmp_path / "profile.json")
    assert list(json.loads((tmp_path / "profile.json").read_text()))[:2] == ["kind", "format_version"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": ()}, "workers: empty"),
        ({"workers": PROFILE.workers * 2}, r"workers\[2\].name"),
        ({"partitions": PROFILE.partitions * 2}, r"partitions\[4\].name"),
        ({"workers": (replace(PROFILE.workers[0], name="gpu0"),)}, "'gpu0' is not a location"),
        ({"links": (replace(PROFILE.links[0], target="worker:9/cpu"),)}, r"links\[0\].target: 'worker:9/cpu'"),
        ({"links": PROFILE.links * 2}, r"links\[2\]"),
        ({"links": (replace(PROFILE.links[0], points=()),)}, r"links\[0\].points: empty"),
        (
            {"links": (replace(PROFILE.links[0], points=(LinkPoint(9, 1), LinkPoint(3, 1))),)},
            r"links\[0\].points: sizes must grow",
        ),
        ({"edges": (Edge("p0", "nobody", 1),)}, r"edges\[0\].target: 'nobody'"),
        ({"edges": (Edge("p0", "p1", 1), Edge("p0", "p2", 2))}, "has another size"),
        ({"edges": (Edge("p0", "p1", 1), Edge("p1", "p2", 1), Edge("p2", "p0", 1))}, "cycle: p0 -> p1 -> p2 -> p0"),
        ({"ties": (Tie("w", ("p0", "p9"), 4),)}, r"ties\[0\].partitions: 'p9'"),
        ({"measurements": PROFILE.measurements * 2}, r"measurements\[16\]"),
        ({"partitions": (replace(PROFILE.partitions[0], pin="moon"), *PROFILE.partitions[1:])}, "pin: 'moon'"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(change: dict, message: str) -> None:
    """References resolve, names are unique, the graph has no cycle: each breach is told with its place."""
    with pytest.raises(FormatError, match=message):
        replace(PROFILE, **change)


def test_pins_name_workers_ranks_kinds_and_hosts() -> None:
    """A pin matches by worker, by rank alone, by kind and by host, and nothing else."""
    worker = PROFILE.workers[1]
    assert all(PROFILE.matches(pin, worker) for pin in ("worker:1/cpu", "worker:1", "kind1", "host1"))
    assert not any(PROFILE.matches(pin, worker) for pin in ("worker:0", "worker:11", "kind0", "cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "stages: empty"),
        ({"stages": (Stage("worker:0/cpu", ()),)}, r"stages\[0\].partitions: empty"),
        ({"stages": (Stage("worker:0/cpu", ("p0",), ("p1",)),)}, r"rematerialise: 'p1'"),
        ({"stages": (Stage("worker:0/cpu", ("p0",)), Stage("worker:1/cpu", ("p0",)))}, "'p0' is there already"),
        ({"stages": (Stage("worker:0/cpu", ("p0",)), Stage("worker:0/cuda:0", ("p1",)))}, "the same rank"),
        ({"micro_batches": 3}, "3 of 2 samples do not make a batch of 8"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict, message: str) -> None:
    """Every partition once, remat of what is held, micro-batches that make up the batch."""
    plan = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    with pytest.raises(FormatError, match=message):
        replace(plan, **change)


def test_a_plan_knows_its_ranks_and_placement() -> None:
    """The world size follows the largest rank, whichever ranks are left out."""
    plan = make_plan(PROFILE, [(3, ["p0", "p1"]), (1, ["p2", "p3"])])
    assert plan.world_size == 4
    assert plan.workers == ("worker:3/cpu", "worker:1/cpu")
    assert plan.placement["p2"] == "worker:1/cpu"


def test_order_follows_the_file_where_it_can() -> None:
    """Topological order keeps the file's order among free nodes, and leads every edge forward."""
    assert topological_order(["c", "a", "b"], [("a", "b"), ("b", "c")]) == ("a", "b", "c")
    assert topological_order(["c", "a", "b"], [("a", "b")]) == ("c", "a", "b")


def test_locations_are_read_and_written() -> None:
    """`worker:RANK/DEVICE` both ways; anything else is refused."""
    assert str(Location.parse("worker:3/cuda:1")) == "worker:3/cuda:1"
    for text in ("worker:/cpu", "worker:1", "host/cpu", "worker:1/cuda:", "worker:-1/cpu"):
        with pytest.raises(FormatError, match="is not a location"):
            Location.parse(text)


def test_encode_writes_defaults_out() -> None:
    """A file says everything, so that a reader needs no knowledge of defaults."""
    assert encode(PROFILE)["partitions"][0]["pin"] is None
