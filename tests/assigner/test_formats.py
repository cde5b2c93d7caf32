"""Profiles and plans refuse what is not consistent, and keep what is."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from builders import make_plan, make_profile

import assigner.formatting as fmt
from assigner.errors import FormatError, UsageError
from assigner.formats import document
from assigner.formats.document import encode
from assigner.formats.graph import topological_order
from assigner.formats.plan import load_plan, save_plan
from assigner.formats.profile import Collective, Edge, LinkPoint, Tie, Wire, WireLink, load_profile, save_profile
from assigner.formats.solverreport import Baseline, Candidate, SolverReport, WhatIf
from assigner.formats.stage import Replica, Stage, check_stages
from assigner.formatting import _DIGITS as DIGITS
from assigner.location import Location
from assigner.schedule.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0])


PAIR = ("worker:0/cpu", "worker:1/cpu")
REDUCED = Collective(PAIR, (LinkPoint(1 << 18, 2e-3, 9, 0.02), LinkPoint(1 << 22, 3e-2, 5, 0.01)), "gloo", 0.3, 0.01)


def test_files_give_back_what_was_written(tmp_path, monkeypatch) -> None:
    """A profile and a plan read from their files equal those that were written; a plan that a launcher names, too."""
    plan = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    save_profile(PROFILE, tmp_path / "profile.json")
    save_plan(plan, tmp_path / "plan.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE
    assert load_plan(tmp_path / "plan.json") == plan
    marked = tmp_path / "marked.json"  # by an editor that begins UTF-8 with a byte order mark
    marked.write_text((tmp_path / "plan.json").read_text(), encoding="utf-8-sig")
    assert load_plan(marked) == plan
    monkeypatch.setenv("ASSIGNER_PLAN", str(tmp_path / "plan.json"))
    assert load_plan() == plan
    monkeypatch.delenv("ASSIGNER_PLAN")
    with pytest.raises(UsageError, match="ASSIGNER_PLAN is not set"):
        load_plan()


def test_collectives_are_kept_and_may_be_left_out(tmp_path) -> None:
    """A profile keeps its all-reduces to the last digit; a file of an earlier minor version, without any, has none."""
    path = tmp_path / "profile.json"
    save_profile(replace(PROFILE, collectives=(REDUCED,)), path)
    assert load_profile(path).collectives == (REDUCED,)
    document = json.loads(path.read_text())
    assert document["format_version"] == "1.5"
    del document["collectives"]
    path.write_text(json.dumps({**document, "format_version": "1.0"}))
    assert load_profile(path).collectives == ()


WIRE = Wire((WireLink(*PAIR), WireLink(*PAIR[::-1])), 1.8)
FAR = WireLink("worker:0/cpu", "worker:9/cpu")
BROKEN_WIRES = [
    ((replace(WIRE, links=(WIRE.links[0], FAR)),), r"wires\[0\].links\[1\]: 'worker:9/cpu' is not a worker"),
    ((replace(WIRE, links=WIRE.links[:1]),), r"wires\[0\].links: 1; a wire that is shared has two or more"),
    ((replace(WIRE, links=WIRE.links[:1] * 2),), r"wires\[0\].links\[1\]: 'worker:0/cpu -> worker:1/cpu' is there"),
    ((WIRE, WIRE), r"wires\[1\].links\[0\]: worker:0/cpu -> worker:1/cpu is on wires\[0\], too"),
    ((replace(WIRE, links=(WireLink(PAIR[0], PAIR[0]), WIRE.links[0])),), r"links\[0\]: 'worker:0/cpu' is both"),
]


def test_wires_are_kept_and_may_be_left_out(tmp_path) -> None:
    """A profile keeps which links share a wire; a file of an earlier minor version, without any, has none."""
    path = tmp_path / "profile.json"
    save_profile(replace(PROFILE, wires=(WIRE,)), path)
    assert load_profile(path).wires == (WIRE,)
    document = json.loads(path.read_text())
    del document["wires"]
    path.write_text(json.dumps({**document, "format_version": "1.3"}))
    assert load_profile(path).wires == ()
    for slower in (0.9, math.inf, math.nan):
        path.write_text(json.dumps({**document, "wires": [{**encode(WIRE), "slower": slower}]}))
        with pytest.raises(FormatError, match=r"wires\[0\]\.slower|not JSON"):
            load_profile(path)


@pytest.mark.parametrize(("wires", "message"), BROKEN_WIRES)
def test_wires_that_contradict_themselves_are_refused(wires, message) -> None:
    """Links of workers that are there, two or more, none of them on two wires."""
    with pytest.raises(FormatError, match=message):
        replace(PROFILE, wires=wires)


BROKEN_COLLECTIVES = [
    ({"workers": ["worker:0/cpu", "worker:9/cpu"]}, r"collectives\[0\].workers\[1\]: 'worker:9/cpu' is not a worker"),
    ({"workers": ["worker:0/cpu"]}, r"collectives\[0\].workers: \['worker:0/cpu'\]; an all-reduce takes two or more"),
    ({"workers": []}, r"collectives\[0\].workers: \[\]; an all-reduce takes two or more"),
    ({"workers": ["worker:1/cpu"] * 2}, r"collectives\[0\].workers\[1\]: 'worker:1/cpu' is there already"),
    ({"workers": "worker:1/cpu"}, r"collectives\[0\].workers: .* expected a list"),
    ({"points": []}, r"collectives\[0\].points: empty"),
    ({"points": [{"bytes": 4, "seconds": 1}] * 2}, r"collectives\[0\].points: sizes must grow"),
    ({"points": [{"bytes": 4, "seconds": float("nan")}]}, r"collectives\[0\].points\[0\].seconds: NaN"),
    ({"points": [{"bytes": float("inf"), "seconds": 1}]}, r"collectives\[0\].points\[0\].bytes: Infinity"),
    ({"points": [{"bytes": 4, "seconds": -1}]}, r"collectives\[0\].points\[0\].seconds: -1"),
    ({"points": [{"bytes": 4, "seconds": 1, "samples": 1.5}]}, r"samples: 1.5"),
    ({"busy": 1.5}, r"collectives\[0\].busy: 1.5"),
    ({"busy": float("nan")}, r"collectives\[0\].busy: NaN"),
    ({"backend": "g\nloo"}, r"collectives\[0\].backend"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_COLLECTIVES)
def test_a_collective_that_cannot_be_is_refused(tmp_path, change: dict, message: str) -> None:
    """Unknown workers, fewer than two, one twice, sizes and times that are none: each is told with its place."""
    path = tmp_path / "profile.json"
    save_profile(replace(PROFILE, collectives=(REDUCED,)), path)
    document = json.loads(path.read_text())
    document["collectives"][0].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message):
        load_profile(path)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("links", {"backend": "pigeons"}, r"links\[0\].backend: 'pigeons' is unknown"),
        (
            "links",
            {"points": [{"bytes": 0.25, "seconds": 1}]},
            r"links\[0\].points\[0\].bytes: 0.25 is not allowed",
        ),
        ("workers", {"device": "abacus"}, r"workers\[0\].device: 'abacus' is unknown"),
        ("workers", {"device": "cuda:0"}, r"workers\[0\].device: 'cuda:0' is not allowed; 'worker:0/cpu' is on cpu"),
    ],
)
def test_what_contradicts_itself_or_is_no_measurement_is_refused(tmp_path, section, change, message) -> None:
    """A carrier that there is not, a message of no whole byte (ratios with it are no numbers), no device."""
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    document = json.loads(path.read_text())
    document[section][0].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message):
        load_profile(path)


@pytest.mark.parametrize("step_s", [0.0, 1.8e18, math.inf])
def test_a_plan_that_nobody_could_read_is_not_written(step_s: float, tmp_path) -> None:
    """Times that nobody has measured add up to less, or more, than a plan's file can say."""
    plan = priced(make_plan(PROFILE, [(0, ["p0", "p1", "p2", "p3"])]), PROFILE)
    plan = replace(plan, predicted=replace(plan.predicted, step_s=step_s))
    with pytest.raises(FormatError, match=r"the profile's times, .* nobody could read: predicted.step_s: "):
        save_plan(plan, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_what_is_next_to_nothing_is_nothing(tmp_path) -> None:
    """A quotient by it would not be finite."""
    path = tmp_path / "profile.json"
    save_profile(replace(PROFILE, measurements=(replace(PROFILE.measurements[0], activation_bytes=1e-320),)), path)
    assert load_profile(path).measurements[0].activation_bytes == 0


def test_a_set_of_workers_has_one_collective() -> None:
    """The same workers in another order are the same set."""
    with pytest.raises(FormatError, match=r"collectives\[1\]: 'worker:0/cpu \+ worker:1/cpu' is there already"):
        replace(PROFILE, collectives=(REDUCED, replace(REDUCED, workers=PAIR[::-1])))


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
        ({"ties": (Tie("w", ("p0",), 4),)}, r"ties\[0\].partitions: \['p0'\]; .* has two or more"),
        ({"ties": (Tie("w", ("p0", "p1"), 1e7),)}, r"ties\[0\].bytes: 10,000,000, .* 'p0' have 1,000,000"),
        ({"ties": (Tie("w", ("p0", "p1"), 4), Tie("w", ("p0", "p2"), 4))}, r"ties\[1\].parameter: 'w' is there"),
        (
            {"ties": (Tie("v", ("p0", "p1"), 6e5), Tie("w", ("p1", "p2"), 6e5))},
            r"ties\[1\].bytes: 600,000 beside 600,000 of earlier ties, .* 'p1' have 1,000,000",
        ),
        (
            {"workers": (PROFILE.workers[0], replace(PROFILE.workers[1], name="worker:0/cuda:0", device="cuda:0"))},
            r"workers\[1\].name: 'worker:0/cuda:0' and 'worker:0/cpu' have the same rank",
        ),
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


BROKEN_PLANS = [
    ("stages.0.in_flight", 5, "in_flight: 5 is not allowed; a step has 4 micro-batches"),
    ("stages.0.in_flight", 10**9, "in_flight: 1000000000"),
    ("stages.0.threads", 1e30, r"threads: 1e\+30"),
    ("stages.0.threads", 10**9, "threads: 1000000000"),
    ("stages.0.worker", "worker:99999999/cpu", "at most 65,536 ranks"),
    ("stages.0.worker", "worker:65536/cpu", "at most 65,536 ranks"),
    ("stages.0.worker", f"worker:{'9' * 4000}/cpu", "at most 65,536 ranks"),
    ("stages.0.worker", "worker:\u0663/cpu", "is not a location"),
    ("stages.0.worker", "worker:00/cpu", "is not a location"),
    ("stages.0.worker", "worker:0/cuda:\u0661", "is not a location"),
    ("stages.0.worker", "worker:0/cuda:01", "is not a location"),
    ("stages.0.partitions.0", "p" * 5000, "at most 4,096 characters"),
    ("format_version", "1.\u0661", "format_version"),
    ("format_version", "\u00b2.0", "format_version"),
    ("predicted.bubble_fraction", 1.01, "bubble_fraction: 1.01"),
    ("predicted.step_s", 0, "step_s: 0"),
    ("predicted.step_s", 1e-320, "step_s"),
    ("predicted.workers.1.worker", "worker:0/cpu", r"predicted.workers\[1\].worker: 'worker:0/cpu' is there already"),
    ("predicted.transfers.1.source", "worker:0/cpu", r"predicted.transfers\[1\]"),
    ("solver.bound_s", 2.0, "solver.bound_s: 2 is not allowed"),
    ("solver.any_order_s", 2.0, "solver.any_order_s: 2 is not allowed"),
    ("solver.gap", 1.5, "gap: 1.5"),
    ("solver.options.deep", [[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]], "nested too deeply"),
    ("solver.options.prices", {"kind0": float("nan")}, "solver.options.prices.kind0: NaN"),
    ("solver.options.pins", {"p0": "\ud800"}, r"options.pins.p0.*text in Unicode"),
    ("candidates.0.bound_s", 3.0, r"candidates\[0\].bound_s: 3"),
    ("baselines.0.step_s", 0, "step_s: 0"),
    ("what_if.0.step_s", 0, "step_s: 0"),
    ("what_if.0.bound_s", 2.0, r"what_if\[0\].bound_s: 2 is not allowed"),
    ("micro_batches", 65_537, "micro_batches: 65537 is not allowed; expected a whole number, at most 65536"),
    ("created_at", "\udfff", "created_at"),
]


def changed(document: dict, place: str, value: object) -> dict:
    """The document with one value at a dotted place."""
    *way, last = [int(word) if word.isdecimal() else word for word in place.split(".")]
    at = document = json.loads(json.dumps(document))
    for word in way:
        at = at[word]
    at[last] = value
    return document


@pytest.mark.parametrize(("place", "value", "message"), BROKEN_PLANS, ids=[place for place, _, _ in BROKEN_PLANS])
def test_a_plan_that_cannot_be_is_refused(tmp_path, place: str, value: object, message: str) -> None:
    """Numbers that no run and no proof can have, names that no rank has, two predictions for one worker."""
    plan = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    report = SolverReport("HiGHS", "1", "optimal", 1.0, 1.0, 0.0, 1.0)
    plan = replace(
        priced(plan, PROFILE), solver=report, candidates=(Candidate("gpipe", 4, 2, 1.0, 1.0, "chosen"),),
        baselines=(Baseline("equal split", 1.0),), what_if=(WhatIf("worker", "one more", 1.0, 1.0),),
    )  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(encode(plan)))
    assert load_plan(path) == plan
    transfers = encode(plan)["predicted"]["transfers"]
    assert len(transfers) == 2
    document = changed(encode(plan), place, value)
    if place.startswith("predicted.transfers"):
        document["predicted"]["transfers"][1] = transfers[0]
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message) as error:
        load_plan(path)
    assert len(error.value.message) < 3000
    assert error.value.message.isprintable()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("workers.0.threads", 1e30, "threads"),
        ("workers.0.name", "worker:99999999/cpu", "at most 65,536 ranks"),
        ("workers.0.memory_bytes", 1e308, r"memory_bytes: 1e\+308 is not allowed; .*at most 1e\+18"),
        ("measurements.0.activation_bytes", 2**63, "activation_bytes: 9223372036854775808"),
        ("measurements.0.forward_s", 1e300, "forward_s"),
        ("measurements.0.micro_batch", 10**10, "micro_batch: 10000000000"),
        ("measurements.0.infeasible", "\ud800", "infeasible"),
        ("workload.batch_size", 10**10, "batch_size"),
        ("environment.torch", float("inf"), "environment.torch: Infinity"),
        ("environment.odd", "\ud800", "environment.odd"),
        ("warnings", ["\ud800"], r"warnings\[0\]"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path, place: str, value: object, message: str) -> None:
    """Numbers whose sums and products overflow, text that is none."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(encode(PROFILE), place, value)))
    with pytest.raises(FormatError, match=message):
        load_profile(path)


def test_whole_numbers_of_bytes_that_no_array_holds_exactly_become_floats(tmp_path) -> None:
    """A field that may have a fraction holds a float then: sums of such are no integers beyond 64 bits."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(encode(PROFILE), "measurements.0.activation_bytes", 10**18)))
    read = load_profile(path).measurements[0].activation_bytes
    assert isinstance(read, float)
    assert read == 10**18


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


class Compared(str):
    """A name that counts how often names are compared."""

    __slots__ = ()
    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)


def test_long_lists_of_names_are_not_compared_each_with_each(monkeypatch):
    """A plan's checks, a document's fields and the text of a range look at each name a few times, however many."""
    many = 500
    split = []

    class Digits:
        def split(self, name: str) -> list[str]:
            split.append(name)
            return DIGITS.split(name)

    def names() -> tuple[str, ...]:
        return tuple(Compared(f"block.{n}") for n in range(many))

    replicas = (Replica("worker:0/cpu", 1, updates=names()), Replica("worker:1/cpu", 1, updates=()))
    monkeypatch.setattr(Compared, "count", 0)
    check_stages([Stage(None, names(), names(), replicas=replicas)], 2)
    with pytest.raises(FormatError, match=r"'block\.499' stands twice"):
        document._no_duplicates([(name, None) for name in (*names(), "block.499")])
    assert Compared.count < 50 * many
    monkeypatch.setattr(fmt, "_DIGITS", Digits())
    assert fmt.ranges([str(name) for name in names()]) == "block.0-499 (500)"
    assert len(split) < 2 * many
