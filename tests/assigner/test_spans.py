"""Spans: what was predicted and what was measured in one form, on one clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.errors import FormatError, UsageError
from assigner.formats.trace import Trace, TracedAction, TracedMessage
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated
from assigner.validation.spans import measured_spans, median_step, predicted_spans

PROFILE = make_profile(work=[2e-3] * 4, slowness=[1.0, 2.0], bandwidth=1e7, edge_bytes=1e5)
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
COST = CostModel(PROFILE)
TIMELINE = simulated(PLAN, COST)
PREDICTED = predicted_spans(TIMELINE, COST)
FIRST, SECOND = PLAN.workers


def changed(trace: Trace, change) -> Trace:
    """The trace with every action as `change(worker, action)` has it."""
    workers = (
        replace(each, actions=tuple(change(each.worker, action) for action in each.actions)) for each in trace.workers
    )
    return replace(trace, workers=tuple(workers))


def test_computes_and_messages_are_the_simulators() -> None:
    """Starts and ends are those of the timeline's events: of a send those on the wire."""
    events = {(e.worker, e.action.kind.value, e.action.stage, e.action.micro_batch): e for e in TIMELINE.events}
    drawn = [each for each in PREDICTED.spans if each.kind != "receive"]
    assert len(drawn) == len(TIMELINE.events)
    for span in drawn:
        event = events[span.worker, span.kind, span.stage, span.micro_batch]
        assert (span.start_s, span.end_s) == pytest.approx((event.start_s, event.end_s))


def test_a_slow_link_queues_its_messages() -> None:
    """On a link that is slower than its sender each message waits for the one before, and says how long."""
    slow = make_profile(work=[2e-3] * 4, slowness=[1.0, 1.0], bandwidth=1e6, edge_bytes=1e5)
    cost = CostModel(slow)
    sends = [each for each in predicted_spans(simulated(PLAN, cost), cost).spans if each.kind == "send"]
    first = [each for each in sends if each.worker == FIRST]
    assert first[0].queued_s == 0
    for before, after in pairwise(first):
        assert after.start_s == before.end_s
        assert after.queued_s > before.queued_s


def test_a_run_as_predicted_has_the_spans_that_were_predicted() -> None:
    """Any step of it, moved to 0; all of them one behind the other."""
    trace = run_in(PROFILE, PLAN, steps=3)
    second = measured_spans(trace, PLAN, step=1)
    assert [step.number for step in second.steps] == [1]
    for said, seen in zip(PREDICTED.spans, second.spans, strict=True):
        assert said[:5] == seen[:5]
        assert (seen.start_s, seen.end_s) == pytest.approx((said.start_s, said.end_s))
    every = measured_spans(trace, PLAN)
    assert len(every.spans) == 3 * len(PREDICTED.spans)
    assert {span.step for span in every.spans} == {0, 1, 2}
    assert every.steps[2].start_s == pytest.approx(2 * TIMELINE.step_s)
    for said, seen in zip(predicted_spans(TIMELINE, COST, steps=3).steps, every.steps, strict=True):
        assert said == pytest.approx(seen)


def test_a_step_that_begins_early_begins_below_zero() -> None:
    """A worker that waits for the next step's first message while another finishes the last one."""
    trace = run_in(PROFILE, PLAN, steps=2)
    early = changed(
        trace,
        lambda worker, action: replace(action, start_s=action.start_s - 0.01)
        if worker == SECOND and action.step == 1 and action.kind == "receive" and action.micro_batch == 0
        and action.message.payload == "activation"
        else action,
    )  # fmt: skip
    starts = [span.start_s for span in measured_spans(early, PLAN, step=1).spans]
    assert min(starts) == pytest.approx(-0.01)


def test_the_median_step_is_one_of_the_run() -> None:
    """Of four steps the faster one in the middle."""
    trace = run_in(PROFILE, PLAN, steps=4)
    late = {0: 0.0, 1: 0.5, 2: 0.6, 3: 0.8}
    longer = changed(
        trace,
        lambda _, action: replace(action, start_s=action.start_s + late.get(action.step - 1, 0.0),
                                  end_s=action.end_s + late[action.step]),
    )  # fmt: skip
    order = sorted(range(4), key=lambda n: longer.step_s[n])
    assert median_step(longer) == order[1]
    assert median_step(run_in(PROFILE, PLAN, steps=1)) == 0


@pytest.mark.parametrize(
    ("remat", "expected"), [("plan", [True] * 4), ("never", [False] * 4), ("except_last", [True] * 3 + [False])]
)
def test_backwards_say_whether_they_recompute(remat, expected) -> None:
    """As the run did it, which need not be as the plan says."""
    plan = replace(PLAN, stages=(replace(PLAN.stages[0], rematerialise=("p0",)), PLAN.stages[1]))
    spans = measured_spans(replace(run_in(PROFILE, plan), remat=remat), plan, step=0).spans
    mine = sorted((each for each in spans if each.worker == FIRST and each.kind == "backward"), key=lambda s: s[4])
    assert [each.recomputes for each in mine] == expected
    assert not any(each.recomputes for each in spans if each.kind != "backward")


def test_sends_noted_together_share_the_link() -> None:
    """Of two that were handed over at once the second one's time on the link begins where the first one's ends."""

    def send(micro_batch: int, end_s: float) -> TracedAction:
        message = TracedMessage("activation", "p1", 0, SECOND, 1.0)
        return TracedAction(0, "send", 0, micro_batch, 0.1, end_s, message)

    trace = run_in(PROFILE, PLAN, steps=1)
    whole = next(each for each in trace.workers[0].actions if each.kind == "step")
    first = replace(trace.workers[0], actions=(whole, send(0, 0.2), send(1, 0.3), send(2, 0.3)))
    spans = measured_spans(replace(trace, workers=(first, trace.workers[1])), PLAN, step=0).spans
    found = [(s.start_s, s.end_s, s.queued_s) for s in spans if s.kind == "send" and s.worker == FIRST]
    assert found == [(0.1, 0.2, 0.0), (0.2, 0.3, 0.1), (0.3, 0.3, pytest.approx(0.2))]


def test_messages_know_their_route() -> None:
    """A send and its receive have one route, the program's; a compute action has none."""
    routes = set(TIMELINE.program.routes)
    sends, receives = ({s.route for s in PREDICTED.spans if s.kind == kind} for kind in ("send", "receive"))
    assert sends == receives == routes
    assert {s.route for s in PREDICTED.spans if s.message is None} == {None}


def test_what_does_not_fit_is_refused() -> None:
    """A step that was not traced, and a trace of another plan."""
    trace = run_in(PROFILE, PLAN, steps=2)
    with pytest.raises(UsageError, match="step 2") as error:
        measured_spans(trace, PLAN, step=2)
    assert "0 to 1" in str(error.value.hint)
    with pytest.raises(FormatError, match="another plan"):
        measured_spans(trace, replace(PLAN, schedule="1f1b"), step=0)


def test_a_slower_worker_shows_in_its_spans_alone() -> None:
    """The same actions on both sides, those of the slow worker longer."""
    seen = measured_spans(run_in(slower_worker(PROFILE, 1, forward=1.5), PLAN), PLAN, step=0)
    said = {(s.worker, s.kind, s.stage, s.micro_batch): s.seconds for s in PREDICTED.spans if s.message is None}
    for span in seen.spans:
        if span.message is None:
            factor = 1.5 if (span.worker, span.kind) == (SECOND, "forward") else 1.0
            expected = factor * said[span.worker, span.kind, span.stage, span.micro_batch]
            assert span.seconds == pytest.approx(expected)
