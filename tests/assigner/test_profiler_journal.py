"""The journal of an interrupted run."""

import json
import sys
from dataclasses import replace

import pytest

from assigner.errors import FormatError, MeasurementError
from assigner.formats.profile import Collective, Link, LinkPoint, Measurement, Wire, WireLink
from assigner.profiler.journal import FoundWires, Head, Journal, Note, OptimizerSize, journal_path
from assigner.profiler.tasks import Point

HEAD = Head(
    entry="model.py:workload", fingerprint="sha256:00", batch_size=8, optimizer="AdamW", micro_batches=(2, 4),
    largest_message=4096, isolated=False, only=(), updates="", worker="worker:1/cpu", device="CPU", threads=1, ranks=3,
    tool_version="0.1.0", torch="2.5.0",
)  # fmt: skip
POINT = Measurement("embed", "worker:1/cpu", 2, 1e-3, 2e-3, 1e-4, 10, 20, 7, 0.01, update_spread=0.2)
BAD = Measurement("head", "worker:1/cpu", 4, infeasible="out of memory when measured")
LINK = Link("worker:1/cpu", "worker:0/cpu", (LinkPoint(1024, 1e-4, 30, 0.02),), "gloo", 0.1, 0.2)
REDUCED = Collective(("worker:1/cpu", "worker:2/cpu"), (LinkPoint(1 << 18, 1e-3, 30, 0.02),), "gloo", 0.3, 0.01)


def wire(*ends, slower):
    """Of some ranks' links."""
    return Wire(tuple(WireLink(f"worker:{source}/cpu", f"worker:{target}/cpu") for source, target in ends), slower)


WIRES = (wire((0, 1), (1, 2), slower=2.1),)


def link(*, source=1, target=0, points=(1024,), **changes):
    """The line of a link."""
    sizes = [{"bytes": size, "seconds": 1e-4, "samples": 9} for size in points]
    ends = {"source": f"worker:{source}/cpu", "target": f"worker:{target}/cpu"}
    return json.dumps({"link": {**ends, "points": sizes, "sender_busy": 0, "receiver_busy": 0, **changes}})


def reduced(*ranks, points=(1024,), **changes):
    """The line of an all-reduce."""
    sizes = [{"bytes": size, "seconds": 1e-4, "samples": 9} for size in points]
    workers = [f"worker:{rank}/cpu" for rank in ranks or (1, 2)]
    return json.dumps({"collective": {"workers": workers, "points": sizes, "backend": "gloo", "busy": 0, **changes}})


def wires(*ends, slower=2.0):
    """The line of one wire."""
    links = [{"source": f"worker:{source}/cpu", "target": f"worker:{target}/cpu"} for source, target in ends]
    return json.dumps({"wires": {"wires": [{"links": links, "slower": slower}]}})


@pytest.fixture
def path(tmp_path):
    """A journal with one entry of each sort."""
    where = journal_path(tmp_path / "profile.json", 1)
    journal = Journal(where, HEAD)
    for found in (
        OptimizerSize("k0", 96),
        POINT,
        BAD,
        LINK,
        REDUCED,
        FoundWires((wire((0, 1), (2, 1), slower=1.5),)),
        FoundWires(WIRES),
        Note("the wire is shared"),
        Note("slow", Point("embed", 2)),
    ):
        journal.add(found)
    return where


def test_what_was_kept_is_read_again(path):
    """Points, what ran out of memory, optimizer bytes, links, the wires found last, all-reduces and notes, exactly."""
    again = Journal(path, HEAD)
    assert again.load()
    assert again.points == {Point("embed", 2): POINT, Point("head", 4): BAD}
    assert again.optimizer_bytes == {"k0": 96}
    assert again.links == {0: LINK}
    assert again.collectives == {(1, 2): REDUCED}
    assert again.wires == WIRES
    assert list(again.notes) == ["the wire is shared", "slow"]


def test_the_file_lies_beside_the_profile_and_is_hidden(path):
    """One file for each rank."""
    assert path.name == ".profile.json.part-1.jsonl"


def test_nothing_is_on_the_disk_before_the_first_measurement(tmp_path):
    """A run that fails before it has measured anything leaves no file."""
    journal = Journal(tmp_path / "j", HEAD)
    journal.remove()
    assert not journal.load()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [1, 10, 60])
def test_a_torn_last_line_is_dropped_and_the_run_goes_on_behind_it(path, kept):
    """A killed process leaves part of a line; what is added next stands on a line of its own."""
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:kept])
    journal = Journal(path, HEAD)
    assert journal.load()
    assert set(journal.points) == {Point("embed", 2)}
    journal.add(BAD)
    again = Journal(path, HEAD)
    assert again.load()
    assert set(again.points) == {Point("embed", 2), Point("head", 4)}


def test_a_torn_head_is_an_empty_journal(path):
    """Nothing was measured yet."""
    path.write_bytes(path.read_bytes()[:40])
    journal = Journal(path, HEAD)
    assert not journal.load()
    journal.add(POINT)
    assert Journal(path, HEAD).load()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("threads", 2, "threads 1 there, 2 now"),
        ("micro_batches", (2, 8), "micro_batches [2, 4] there, [2, 8] now"),
        ("fingerprint", "sha256:11", "fingerprint"),
        ("ranks", 4, "ranks 3 there, 4 now"),
        ("worker", "worker:0/cpu", "worker"),
        ("tool_version", "9.9.9", "tool_version"),
        ("only", ("links",), "only"),
    ],
)
def test_a_journal_of_another_measurement_is_refused(path, field, value, said):
    """The error says what differs, and the file stays as it is."""
    before = path.read_bytes()
    with pytest.raises(FormatError, match="belongs to another measurement") as caught:
        Journal(path, replace(HEAD, **{field: value})).load()
    assert said in caught.value.message
    assert "--resume" in caught.value.hint
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "expected an object"),
        ("{}", "expected an object with one of"),
        (json.dumps({"measurement": {"partition": "embed"}}), "measurement.worker: missing"),
        (json.dumps({"link": {"source": "worker:1/cpu", "target": "worker:0/cpu"}}), "link.points: missing"),
        ('{"optimizer": {"kind": "k", "bytes": NaN}}', "a whole number"),
        ('{"optimizer": {"kind": "k", "bytes": -1}}', "0 or more"),
        (json.dumps({"measurement": {**vars(POINT), "worker": "worker:0/cpu"}}), "not of this worker"),
        (json.dumps({"measurement": {**vars(POINT), "micro_batch": 3}}), "not of this worker"),
        (link(source=0, target=1), "the link from worker:0/cpu to worker:1/cpu is none of worker:1/cpu"),
        (link(target=1), "the link from worker:1/cpu to worker:1/cpu is none"),
        (link(target=3), "the link from worker:1/cpu to worker:3/cpu is none"),
        (link(points=[]), "link.points: empty"),
        (link(points=[1024, 1024]), "sizes must grow"),
        (link(points=[4096, 1024]), "sizes must grow"),
        (link(sender_busy=5), "link.sender_busy: 5 is not allowed"),
        (link(target="x"), "is not a location"),
        (reduced(0, 1), "the all-reduce among worker:0/cpu, worker:1/cpu is none of worker:1/cpu"),
        (reduced(1), "the all-reduce among worker:1/cpu is none"),
        (reduced(1, 1), "the all-reduce among worker:1/cpu, worker:1/cpu is none"),
        (reduced(1, 3), "the all-reduce among worker:1/cpu, worker:3/cpu is none"),
        (reduced(1, 2, 0), "ranks stand in their order"),
        (reduced(workers="all"), "expected a list"),
        (reduced(workers=[]), "is none of"),
        (reduced(points=[]), "collective.points: empty"),
        (reduced(points=[4096, 1024]), "sizes must grow"),
        (reduced(busy=1.5), "collective.busy: 1.5 is not allowed"),
        (wires((0, 1)), "wires that links of 3 ranks cannot share: [[0, 1]]"),
        (wires((0, 1), (0, 1)), "cannot share"),
        (wires((0, 1), (1, 3)), "cannot share"),
        (wires((0, 1), (1, 1)), "cannot share"),
        (wires((0, 1), (1, "x")), "is not a location"),
        (wires((0, 1), (1, 2), slower=0.5), "slower: 0.5 is not allowed"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(path, line, said):
    """Only the end of a file can be torn; anything else wrong was not written by this program."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(FormatError, match="line 3: ") as caught:
        Journal(path, HEAD).load()
    assert said in caught.value.message


def test_a_new_run_replaces_what_was_left(path):
    """Without --resume the journal is begun anew, and at the end it is gone."""
    journal = Journal(path, HEAD)
    journal.remove()
    assert not path.exists()
    journal.add(POINT)
    again = Journal(path, HEAD)
    again.load()
    assert set(again.points) == {Point("embed", 2)}
    assert not again.links
    journal.remove()
    assert not path.exists()


def test_without_a_folder_nothing_is_written():
    """A rank whose host has no such folder measures all the same."""
    journal = Journal(None, HEAD)
    journal.remove()
    assert not journal.load()
    journal.add(POINT)
    assert journal.points
    journal.remove()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a full disk on Linux")
def test_a_full_disk_is_named_with_the_file(tmp_path):
    """No partition is to blame, and to go on without room would end the same way."""
    where = journal_path(tmp_path / "profile.json", 1)
    where.symlink_to("/dev/full")
    with pytest.raises(MeasurementError, match=rf"cannot keep what was measured in {where}: No space left") as caught:
        Journal(where, HEAD).add(POINT)
    assert caught.value.hint == "make room there first; a run with another -o starts over"
