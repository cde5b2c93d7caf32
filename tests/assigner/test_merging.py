"""Profiles put together, on made ones."""

from dataclasses import replace

import pytest
from builders import make_profile

from assigner.errors import FormatError
from assigner.formats.merging import merged, updated
from assigner.formats.profile import Collective, LinkPoint, Measurement, Wire, WireLink
from assigner.formats.profilewarnings import launch_bound
from assigner.schedule.cost import CostModel


@pytest.fixture
def ours():
    """Two workers."""
    return make_profile(work=[1e-3, 2e-3], slowness=[1.0, 2.0])


@pytest.fixture
def theirs():
    """Two more, slower."""
    return make_profile(work=[1e-3, 2e-3], slowness=[3.0, 4.0])


def test_the_others_workers_follow_with_their_prices(ours, theirs):
    """Every worker keeps what was measured on it, under a new rank for the second profile's."""
    whole = merged([("a", ours), ("b", theirs)])
    assert [worker.name for worker in whole.workers] == [f"worker:{rank}/cpu" for rank in range(4)]
    cost, old = CostModel(whole), CostModel(theirs)
    assert cost.partition("p1", "worker:3/cpu", 4) == old.partition("p1", "worker:1/cpu", 4)
    assert cost.partition("p1", "worker:1/cpu", 4) == CostModel(ours).partition("p1", "worker:1/cpu", 4)
    assert {(link.source[7], link.target[7]) for link in whole.links} == {
        ("0", "1"),
        ("1", "0"),
        ("2", "3"),
        ("3", "2"),
    }


def test_collectives_follow_their_workers(ours, theirs):
    """Those of the second profile under its workers' new ranks, none across the two."""
    one, two = (
        replace(each, collectives=(Collective(("worker:0/cpu", "worker:1/cpu"), (LinkPoint(1e6, seconds),)),))
        for each, seconds in ((ours, 1.0), (theirs, 2.0))
    )
    whole = merged([("a", one), ("b", two)])
    assert [(each.workers, each.points[0].seconds) for each in whole.collectives] == [
        (("worker:0/cpu", "worker:1/cpu"), 1.0),
        (("worker:2/cpu", "worker:3/cpu"), 2.0),
    ]


def test_wires_follow_their_workers(ours, theirs):
    """Those of the second profile under its workers' new ranks, in the warning too."""
    whole = merged([("a", replace(ours, wires=(WIRE,))), ("b", replace(theirs, wires=(WIRE,)))])
    assert [[(each.source, each.target) for each in wire.links] for wire in whole.wires] == [
        [("worker:0/cpu", "worker:1/cpu"), ("worker:1/cpu", "worker:0/cpu")],
        [("worker:2/cpu", "worker:3/cpu"), ("worker:3/cpu", "worker:2/cpu")],
    ]
    assert [text.partition(" share")[0] for text in whole.warnings if "share a wire" in text] == [
        "worker:0 -> worker:1 and worker:1 -> worker:0", "worker:2 -> worker:3 and worker:3 -> worker:2",
    ]  # fmt: skip


def test_a_new_collective_replaces_that_of_the_same_workers():
    """In whichever order they are named; the others stay, and so do all where none is new."""
    pair, other = ("worker:0/cpu", "worker:1/cpu"), ("worker:1/cpu", "worker:2/cpu")
    old = replace(
        make_profile(work=[1e-3], slowness=[1.0, 2.0, 3.0]),
        collectives=tuple(Collective(workers, (LinkPoint(1e6, 1.0),)) for workers in (pair, other)),
    )
    fresh = Collective(pair[::-1], (LinkPoint(1e6, 3.0),))
    new = updated(old, measurements=(), links=(), collectives=(fresh,), created_at="now")
    assert new.collectives == (old.collectives[1], fresh)
    assert updated(old, measurements=(), links=(), created_at="now").collectives == old.collectives


def test_missing_links_are_a_warning(ours, theirs):
    """No link leads from one group to the other; the file says so, and how to measure them."""
    (said,) = merged([("a", ours), ("b", theirs)]).warnings
    assert "no links between worker:0, worker:1 and worker:2, worker:3" in said
    assert "--only links" in said


def test_three_profiles_are_numbered_through(ours, theirs):
    """Ranks follow over any number of profiles, and different micro-batch sizes are fine."""
    sized = replace(theirs, measurements=tuple(each for each in theirs.measurements if each.micro_batch == 4))
    whole = merged([("a", ours), ("b", theirs), ("c", sized)])
    assert [worker.rank for worker in whole.workers] == list(range(6))
    assert {each.micro_batch for each in whole.measurements if each.worker == "worker:5/cpu"} == {4}


def test_pins_and_warnings_follow_their_ranks(ours, theirs):
    """A pin that only the second has moves with its workers, as does a rank in a warning of its measurement."""
    parts = (replace(theirs.partitions[0], pin="worker:1"), replace(theirs.partitions[1], pin="worker:0/cpu"))
    other = replace(theirs, partitions=parts, warnings=("worker:1 shares its wire",))
    whole = merged([("a", ours), ("b", other)])
    assert [part.pin for part in whole.partitions] == ["worker:3", "worker:2/cpu"]
    assert "worker:3 shares its wire" in whole.warnings


def test_a_pin_of_both_is_the_models_own(ours, theirs):
    """It stands in the model's code and means a rank of the run; another one there is told and not used."""
    pinned = [replace(each, partitions=(replace(each.partitions[0], pin="worker:1"), each.partitions[1]))
              for each in (ours, theirs)]  # fmt: skip
    whole = merged([("a", pinned[0]), ("b", pinned[1])])
    assert whole.partitions[0].pin == "worker:1"
    assert not any("pinned" in text for text in whole.warnings)
    other = replace(theirs, partitions=(replace(theirs.partitions[0], pin="worker:0"), theirs.partitions[1]))
    whole = merged([("a", pinned[0]), ("b", other)])
    assert whole.partitions[0].pin == "worker:1"
    assert "p0 is pinned to worker:1, and to worker:0 in b; not used" in whole.warnings


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "sha256:11"), ("batch_size", 9), ("dtype", "bfloat16"), ("optimizer", "Adam")]
)
def test_another_workload_is_refused(ours, theirs, field, value):
    """The error names the file and what differs."""
    other = replace(theirs, workload=replace(theirs.workload, **{field: value}))
    with pytest.raises(FormatError, match=rf"b\.json was measured of another workload than a\.json: its {field} is"):
        merged([("a.json", ours), ("b.json", other)])


def test_other_partitions_are_refused(ours):
    """Even where a fingerprint was written by hand."""
    with pytest.raises(FormatError, match="differ in 'p2'"):
        merged([("a", ours), ("b", make_profile(work=[1e-3] * 3, slowness=[1.0]))])


def test_new_figures_take_the_place_of_old_ones(ours):
    """A point of the same kind, worker and size is replaced; another size is added; all else stays."""
    new = [Measurement("p0", "worker:1/cpu", size, 9.0, 9.0, 9.0, samples=7) for size in (4, 8)]
    whole = updated(ours, measurements=new, links=(), created_at="2026-01-01T00:00:00Z")
    cost, old = CostModel(whole), CostModel(ours)
    assert cost.partition("p0", "worker:1/cpu", 4).forward_s == 9.0
    assert cost.partition("p0", "worker:1/cpu", 8).forward_s == 9.0
    assert cost.partition("p0", "worker:1/cpu", 1) == old.partition("p0", "worker:1/cpu", 1)
    assert cost.partition("p0", "worker:0/cpu", 4) == old.partition("p0", "worker:0/cpu", 4)
    assert whole.links == ours.links
    assert len(whole.measurements) == len(ours.measurements) + 1
    assert whole.created_at == "2026-01-01T00:00:00Z"


def test_a_partition_of_the_same_kind_is_replaced(ours):
    """Partitions that are alike share figures: a new one of either stands for both."""
    alike = replace(ours, partitions=tuple(replace(each, kind="one") for each in ours.partitions),
                    measurements=tuple(each for each in ours.measurements if each.partition == "p1"))  # fmt: skip
    new = [Measurement("p0", each.worker, each.micro_batch, 9.0, 9.0, 9.0) for each in alike.measurements]
    whole = updated(alike, measurements=new, links=(), created_at="")
    assert {each.partition for each in whole.measurements} == {"p0"}
    assert CostModel(whole).partition("p1", "worker:0/cpu", 4).forward_s == 9.0


def test_a_new_link_replaces_or_is_added(ours, theirs):
    """Links that were missing after a merge come in by `--only links`, and their warning goes."""
    whole = merged([("a", ours), ("b", theirs)])
    one = replace(ours.links[0], source="worker:0/cpu", target="worker:2/cpu")
    two = replace(ours.links[0], sender_busy=0.5)
    new = updated(whole, measurements=(), links=(one, two), created_at="")
    assert len(new.links) == len(whole.links) + 1
    assert next(link for link in new.links if link.target == "worker:1/cpu").sender_busy == 0.5
    assert new.warnings == ()


WIRE = Wire((WireLink("worker:0/cpu", "worker:1/cpu"), WireLink("worker:1/cpu", "worker:0/cpu")), 2.0)
WIRES = "worker:0 -> worker:1 and worker:1 -> worker:0 share a wire: 2.0x slower together; plans are priced with it"
CALIBRATED = (
    "calibrated by run.trace: a step took 2 s, and 1 s was predicted",
    "calibrated: worker:0/cpu: forward 1.100x",
    "calibrated: worker:1/cpu: forward 1.200x",
    "calibrated: link worker:0/cpu to worker:1/cpu: 1.300x at 1,000 B",
    "not calibrated, since nobody waited for a message there: link worker:1/cpu to worker:0/cpu",
)


@pytest.fixture
def noted(ours):
    """A calibrated profile of a GPU that waits for its host, and of a wire that is shared."""
    slow = launch_bound("p0", "worker:1/cpu", 4, 0.95)
    said = (WIRES, slow, *CALIBRATED)
    return replace(ours, wires=(WIRE,), warnings=said, environment={"torch": "2", "calibrated": [{}]})


def test_what_was_said_of_replaced_figures_goes_with_them(noted):
    """A point's note with the point, a worker's correction with all of its points; all else stays."""
    of = [each for each in noted.measurements if each.worker == "worker:1/cpu"]
    (point,) = (each for each in of if (each.partition, each.micro_batch) == ("p0", 4))
    one = updated(noted, measurements=[point], links=(), created_at="")
    assert one.warnings == (WIRES, *CALIBRATED)
    assert one.wires == (WIRE,)
    all_points = updated(noted, measurements=of, links=(), created_at="")
    assert all_points.warnings == (WIRES, *CALIBRATED[:2], *CALIBRATED[3:])
    assert all_points.environment == noted.environment


def test_links_that_are_measured_again_are_told_of_anew(noted):
    """A link's correction goes with it, and what was seen of the wires, which are looked at each time."""
    new = updated(noted, measurements=(), links=noted.links[:1], notes=["new"], created_at="")
    assert noted.links[0].target == "worker:1/cpu"
    assert new.warnings == (noted.warnings[1], *CALIBRATED[:3], CALIBRATED[4], "new")
    assert new.wires == ()
    found = replace(WIRE, slower=1.7)
    assert updated(noted, measurements=(), links=noted.links[:1], wires=(found,), created_at="").wires == (found,)


def test_a_profile_that_is_all_new_is_calibrated_no_more(noted):
    """Neither in its warnings nor in its environment."""
    new = updated(noted, measurements=noted.measurements, links=noted.links, created_at="")
    assert new.warnings == ()
    assert new.environment == {"torch": "2"}
