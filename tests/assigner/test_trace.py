"""A trace refuses what is not consistent, and keeps what is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError, UsageError
from assigner.formats.document import encode
from assigner.formats.trace import (
    Trace,
    TracedAction,
    TracedMessage,
    WorkerTrace,
    check_same_plan,
    load_trace,
    save_trace,
)
from assigner.schedule.program import Payload, Route
from assigner.validation.observed import traced_route

PLAN = make_plan(make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0]), [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
FIRST, SECOND = PLAN.workers
OUT = TracedMessage("activation", "p1", 0, SECOND, 64.0)
IN = TracedMessage("activation", "p1", 0, FIRST, 64.0)


def step(number: int, start: float, end: float) -> TracedAction:
    return TracedAction(number, "step", -1, -1, start, end)


FORWARD = TracedAction(0, "forward", 0, 0, 0.1, 0.3, memory_bytes=100.0)
SEND = TracedAction(0, "send", 0, 0, 0.3, 0.6, OUT)
RECEIVE = TracedAction(0, "receive", 1, 0, 0.2, 0.5, IN)


def make_trace(*first: TracedAction, second: tuple[TracedAction, ...] = (RECEIVE,), **others) -> Trace:
    made = {
        "workload": PLAN.workload, "stages": PLAN.stages, "schedule": PLAN.schedule,
        "micro_batches": PLAN.micro_batches, "micro_batch_size": PLAN.micro_batch_size, "steps": 2,
        "workers": (
            WorkerTrace(FIRST, (step(0, 0.0, 1.0), *first, step(1, 1.5, 2.0)), 300.0, 1000.0),
            WorkerTrace(SECOND, (step(0, 0.25, 1.25), *second, step(1, 1.0, 1.75)), 200.0, 900.0, 1e-4),
        ),
    }  # fmt: skip
    return Trace(**{**made, **others})


GOOD = make_trace(FORWARD, SEND)


def test_files_give_back_what_was_written(tmp_path) -> None:
    """A trace read from its file equals the one that was written; a file is replaced only by force."""
    path = tmp_path / "trace.json"
    save_trace(GOOD, path)
    assert load_trace(path) == GOOD
    assert list(json.loads(path.read_text()))[:2] == ["kind", "format_version"]
    with pytest.raises(UsageError, match="exists"):
        save_trace(GOOD, path)
    save_trace(GOOD, path, force=True)


def test_steps_that_overlap_are_counted_once() -> None:
    """The first step from its last start; the second, which a worker began early, from the end of the first."""
    assert GOOD.spans == ((0.25, 1.25), (1.25, 2.0))
    assert GOOD.step_s == (1.0, 0.75)


def test_what_passes_between_two_steps_is_of_neither() -> None:
    """A batch that is made in between takes no time of a step."""
    late = (
        WorkerTrace(FIRST, (step(0, 0.0, 1.0), step(1, 3.0, 4.0)), 0.0, 0.0),
        WorkerTrace(SECOND, (step(0, 0.0, 1.5), step(1, 2.5, 4.25)), 0.0, 0.0),
    )
    assert replace(GOOD, workers=late).spans == ((0.0, 1.5), (2.5, 4.25))


def test_both_ends_name_one_route() -> None:
    """The route of a send and that of its receive are the same."""
    assert SEND.message is not None
    assert RECEIVE.message is not None
    sent, received = traced_route(SEND.message, FIRST, sent=True), traced_route(RECEIVE.message, SECOND, sent=False)
    assert sent == received == Route(Payload.ACTIVATION, "p1", 0, FIRST, SECOND)
    assert SEND.seconds == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (replace(FORWARD, end_s=0.0), r"workers\[0\].actions\[1\]: it ends at 0 s, before its start at 0.1 s"),
        (replace(FORWARD, step=2), r"actions\[1\].step: 2 is not allowed; the trace has 2"),
        (replace(FORWARD, step=-1), r"actions\[1\].step: -1 is not allowed"),
        (replace(FORWARD, stage=2), r"actions\[1\].stage: 2 is not allowed; the trace has 2"),
        (replace(FORWARD, micro_batch=PLAN.micro_batches), r"actions\[1\].micro_batch"),
        (replace(FORWARD, message=OUT), r"actions\[1\].message: a send or a receive has one"),
        (replace(SEND, message=None), r"actions\[1\].message: a send or a receive has one"),
        (replace(SEND, message=replace(OUT, peer=FIRST)), r"message.peer: 'worker:0/cpu' is no other worker"),
        (replace(SEND, message=replace(OUT, partition="p9")), r"message.partition: 'p9' is in none of the stages"),
        (step(0, 0.0, 1.0), r"workers\[0\].actions: 3 actions of kind \"step\", of 2 steps"),
        (replace(FORWARD, stage=1), r"actions\[1\].stage: 1 is not allowed; 'worker:1/cpu' holds it"),
        (replace(SEND, stage=1), r"actions\[1\].stage: 1 is not allowed; 'worker:1/cpu' holds it"),
        (replace(FORWARD, stage=-1), r"actions\[1\].stage: -1 is not allowed; forward is of a stage"),
        (replace(FORWARD, kind="backward", micro_batch=-1), r"actions\[1\].micro_batch: -1 is not allowed; backward"),
        (replace(SEND, micro_batch=-1), r"actions\[1\].micro_batch: -1 is not allowed; send is of a micro_batch"),
    ],
)
def test_an_action_that_cannot_be_is_refused(action: TracedAction, message: str) -> None:
    """Times, numbers, messages and whole steps are checked, and the place is told."""
    with pytest.raises(FormatError, match=message):
        make_trace(action)


@pytest.mark.parametrize("second", [(0.2, 0.5), (1.25, 1.25)])
def test_a_file_whose_step_takes_no_time_is_refused(second: tuple[float, float], tmp_path) -> None:
    """Nothing can be compared with it, and nothing corrected by it; its steps may stand in a wrong order."""
    workers = tuple(WorkerTrace(each, (step(0, 0.0, 1.25), step(1, *second)), 0.0, 0.0) for each in PLAN.workers)
    save_trace(replace(GOOD, workers=workers), path := tmp_path / "trace.json")
    with pytest.raises(FormatError, match=rf"trace\.json: workers: step 1 takes no time: it ends at {second[1]} s"):
        load_trace(path)


def test_updates_and_ties_are_of_no_stage() -> None:
    """What belongs to a whole worker has -1 for both numbers."""
    tie = replace(SEND, stage=-1, micro_batch=-1, message=TracedMessage("tie", "p1", 0, SECOND, 8.0))
    update = TracedAction(0, "update", -1, -1, 0.7, 0.8)
    assert make_trace(tie, update).workers[0].actions[1:3] == (tie, update)


def test_a_number_of_steps_that_nobody_did_takes_no_memory() -> None:
    """A trace that claims 10^15 steps is refused at once."""
    with pytest.raises(FormatError, match=r"actions: 2 actions of kind \"step\", of 2 steps; expected"):
        make_trace(steps=10**15)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (GOOD.workers[:1], "workers: 'worker:1/cpu' holds a stage and is not there"),
        ((*GOOD.workers, GOOD.workers[1]), r"workers\[2\].worker: 'worker:1/cpu' is there already"),
        ((*GOOD.workers, replace(GOOD.workers[1], worker="worker:9/cpu")), r"workers\[2\].worker: 'worker:9/cpu'"),
        ((GOOD.workers[0], replace(GOOD.workers[1], actions=())), r"workers\[1\].actions: 0 actions of kind \"step\""),
    ],
)
def test_workers_are_those_of_the_stages(workers: tuple[WorkerTrace, ...], message: str) -> None:
    """Each worker of a stage is there once, with all its steps, and no other."""
    with pytest.raises(FormatError, match=message):
        make_trace(workers=workers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "stages: empty"),
        ({"stages": (*PLAN.stages, PLAN.stages[0])}, "'p0' is there already"),
        ({"stages": (replace(PLAN.stages[0], in_flight=9), PLAN.stages[1])}, r"stages\[0\].in_flight: 9"),
    ],
)
def test_the_stages_of_a_trace_are_those_of_a_plan(change: dict, message: str) -> None:
    """What no plan may have, no trace has."""
    with pytest.raises(FormatError, match=message):
        make_trace(**change)


def test_text_that_is_none_is_refused_with_its_place(tmp_path) -> None:
    """Half of a surrogate pair cannot be written to a page or a terminal."""
    path = tmp_path / "trace.json"
    document = encode(GOOD)
    document["workers"][0]["actions"][2]["message"]["partition"] = "\ud800"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r'message.partition: "\\ud800" is not allowed; expected text in Unicode'):
        load_trace(path)


def test_a_number_that_cannot_be_is_refused_with_its_place(tmp_path) -> None:
    """A negative time in a file is told with file, place and what is allowed."""
    path = tmp_path / "trace.json"
    save_trace(GOOD, path)
    document = json.loads(path.read_text())
    document["workers"][0]["actions"][1]["start_s"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"trace.json: workers\[0\].actions\[1\].start_s: -1 is not allowed"):
        load_trace(path)


@pytest.mark.parametrize(
    "change", [{"schedule": "1f1b"}, {"micro_batches": 1, "micro_batch_size": 8}, {"stages": PLAN.stages[::-1]}]
)
def test_a_trace_of_another_plan_is_told(change: dict) -> None:
    """`check_same_plan` passes the trace's own plan alone, and names what differs."""
    check_same_plan(GOOD, PLAN)
    with pytest.raises(FormatError, match=f"its {min(change)}|its {max(change)}"):
        check_same_plan(GOOD, replace(PLAN, **change))
