"""What `simulate --against` prints: the figures of the agreement, a cause in one sentence, in 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile, worker_name
from made_runs import run_in, slower_link, slower_worker, with_busy

from assigner.report.agreement import agreement_data, agreement_report, largest_cause
from assigner.report.sheet import Line, Sheet, markdown
from assigner.validation.comparison import Agreement, agree

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

PROFILE = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=2e8, edge_bytes=2e5)
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (2, ["p3", "p4", "p5"])], micro_batches=8)


def found_in(truth: Profile) -> Agreement:
    return agree(PLAN, PROFILE, run_in(truth, PLAN, steps=5))


def sheets(found: Agreement) -> list[Sheet]:
    return [part for part in agreement_report(found) if isinstance(part, Sheet)]


@pytest.mark.parametrize(
    ("truth", "sentence"),
    [
        (PROFILE, "largest cause: none to speak of; the step time is predicted to 1 %"),
        (
            slower_worker(PROFILE, 2, backward=1.12),
            (
                "largest cause: worker:2/cpu's backward of stage 2 took 12.0 % longer than profiled: "
                "+11.5 ms of the +11.5 ms"
            ),
        ),
        (slower_worker(PROFILE, 2, forward=0.5), "worker:2/cpu's forward of stage 2 took 50.0 % less than profiled: -"),
        (
            slower_link(PROFILE, 0, 1, 30.0),
            "from worker:0/cpu to worker:1/cpu took 30.00x as long as profiled",
        ),
        (with_busy(PROFILE, 1.0), "a step between its actions, where 0 s was predicted"),
    ],
)
def test_the_largest_cause_in_one_sentence(truth: Profile, sentence: str) -> None:
    """Who, what, by how much, and what it makes of the step."""
    assert sentence in largest_cause(found_in(truth))


def test_a_cause_larger_than_the_difference_is_said_to_be_one_of_several() -> None:
    """What one worker loses another one wins."""
    truth = slower_worker(slower_worker(PROFILE, 2, backward=1.3), 0, forward=0.5)
    told = largest_cause(found_in(truth))
    assert "of stage 2 took 30.0 % longer than profiled: +" in told
    assert "; others go the other way, and the step differs by +" in told


def test_what_medians_cannot_say_is_called_so() -> None:
    """Where an action now and then takes long the variation is the cause, and no worker is blamed."""
    trace = run_in(PROFILE, PLAN, steps=1)
    late = tuple(
        replace(
            worker,
            actions=tuple(
                replace(each, start_s=each.start_s + (0.05 if each.start_s > 0.06 else 0.0), end_s=each.end_s + 0.05)
                if each.end_s > 0.06
                else each
                for each in worker.actions
            ),
        )
        for worker in trace.workers
    )
    sentence = largest_cause(agree(PLAN, PROFILE, replace(trace, workers=late)))
    assert sentence.endswith("their means are above their medians: +50.0 ms of the +50.0 ms")


def test_the_rows_add_up_to_what_was_measured() -> None:
    """The table of differences starts at the prediction and ends at the measurement."""
    found = found_in(slower_worker(PROFILE, 2, backward=1.12))
    rows = sheets(found)[0].rows
    assert rows[0] == ("predicted", "", "170")
    assert rows[1] == ("forwards, backwards and updates as measured", "+11.5", "181")
    assert rows[-1] == ("not explained", "0", "181 measured")


def test_every_stage_message_and_worker_has_a_row() -> None:
    """Three stages, four routes, three workers."""
    found = found_in(PROFILE)
    assert [len(sheet.rows) for sheet in sheets(found)] == [7, 3, 4, 3]
    stages, messages, workers = sheets(found)[1:]
    assert [row[1] for row in stages.rows] == [worker_name(rank) for rank in range(3)]
    assert {row[-1] for row in messages.rows} <= {f"{n} of 40" for n in range(41)}
    assert all(row[-2] == "0.0" for row in workers.rows)


def test_all_tables_fit_80_columns() -> None:
    """Less important columns are left out; no number is wrapped."""
    for sheet in sheets(found_in(with_busy(PROFILE, 0.3))):
        fitted = sheet.fitted(80)
        assert sum(fitted._needed(n) for n in range(len(fitted.columns))) + 2 * (len(fitted.columns) - 1) <= 80


def test_a_run_that_rematerialised_otherwise_says_so() -> None:
    """The prediction is for what was run."""
    stages = tuple(replace(stage, rematerialise=stage.partitions) for stage in PLAN.stages)
    trace = replace(run_in(PROFILE, replace(PLAN, stages=stages)), stages=PLAN.stages, remat="always")
    found = agree(PLAN, PROFILE, replace(trace, workers=tuple(replace(w, clock_error_s=2e-5) for w in trace.workers)))
    text = markdown(agreement_report(found))
    assert "the run rematerialised every partition" in text
    assert "clocks of the workers agree to 20.0 µs" in text


def test_memory_above_the_prediction_is_a_warning() -> None:
    """More than 5 % above: the worker is named."""
    trace = run_in(PROFILE, PLAN)
    first = replace(trace.workers[0], peak_bytes=1.5 * trace.workers[0].peak_bytes)
    found = agree(PLAN, PROFILE, replace(trace, workers=(first, *trace.workers[1:])))
    last = agreement_report(found)[-1]
    assert isinstance(last, Line)
    assert last.tone == "warning"
    assert last.text.startswith("memory: worker:0/cpu held")


def test_json_has_the_same_figures() -> None:
    """Every number of the tables, unrounded."""
    found = found_in(slower_worker(PROFILE, 2, backward=1.12))
    data = json.loads(json.dumps(agreement_data(found)))
    difference = data["difference"]
    parts = ("compute_s", "transfers_s", "overheads_s", "handling_s", "variation_s", "unexplained_s")
    assert data["step"]["measured_s"] - data["step"]["predicted_s"] == pytest.approx(sum(difference[p] for p in parts))
    assert difference["causes"][0]["worker"] == worker_name(2)
    assert len(data["computes"]) == 9
    assert data["messages"][0]["source"] == worker_name(0)
    assert [each["memory_error"] for each in data["workers"]] == [0, 0, 0]
