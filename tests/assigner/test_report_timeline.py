"""A step as text: what fills a bar, what stands beside it, and that it fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.report.sheet import Line, Sheet
from assigner.report.timeline import bar, timeline, timeline_data
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated, summary
from assigner.validation.spans import Span, Spans, measured_spans, predicted_spans

PROFILE = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=2e8, edge_bytes=2e5)
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (2, ["p3", "p4", "p5"])], micro_batches=8)
COST = CostModel(PROFILE)


def predicted(plan=PLAN) -> Spans:
    return predicted_spans(simulated(plan, COST), COST)


def span(kind, micro_batch: int, start_s: float, end_s: float, *, recomputes: bool = False) -> Span:
    return Span("worker:0/cpu", kind, 0, 0, micro_batch, start_s, end_s, recomputes)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], "          "),
        ([span("forward", 0, 0.0, 3.0), span("backward", 0, 5.0, 10.0)], "0──  0████"),
        ([span("forward", 12, 0.0, 3.0), span("forward", 13, 3.0, 5.0)], "12───     "),
        ([span("backward", 7, 0.0, 3.0, recomputes=True), span("update", -1, 9.0, 10.0)], "7==      U"),
        ([span("forward", 0, 0.0, 0.4), span("forward", 1, 1.0, 1.4), span("forward", 2, 1.4, 1.7)], " ─        "),
        ([span("forward", 0, 0.0, 1.0), span("backward", 0, 1.0, 2.0)], "─█        "),
        ([span("forward", 0, -2.0, 2.0), span("backward", 0, 9.0, 11.0)], "0─       █"),
    ],
)
def test_the_longest_in_a_cell_fills_it(spans: list[Span], expected: str) -> None:
    """Blank where nothing is computed for half of it; a number where the action has a cell more than digits."""
    assert bar(spans, 10.0, 10) == expected


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_one_side_takes_the_width_of_the_terminal(width: int) -> None:
    """Bars are as long as there is room for; every worker has one, with how busy it is."""
    sheet, legend = timeline([predicted()], width=width)
    assert isinstance(sheet, Sheet)
    assert isinstance(legend, Line)
    assert sheet._needed(0) + sheet._needed(1) + sheet._needed(2) + 4 == width
    assert [row[0] for row in sheet.rows] == list(PLAN.workers)
    found = summary(simulated(PLAN, COST), COST)
    assert [row[2] for row in sheet.rows] == [f"{100 * each.compute_s / found.step_s:.1f}" for each in found.workers]


def test_a_pipe_and_a_wide_terminal_get_a_bar_of_sound_length() -> None:
    """Not ten thousand columns."""
    widths = {width: len(timeline([predicted()], width=width)[0].rows[0][1]) for width in (200, 500, 10_000)}
    assert widths[200] == widths[500] > widths[10_000] > 80


def test_both_sides_lie_below_each_other_on_one_scale() -> None:
    """The longer one reaches the end; each row says which side it is."""
    slow = slower_worker(PROFILE, 1, forward=3.0, backward=3.0)
    measured = measured_spans(run_in(slow, PLAN, steps=1), PLAN, step=0)
    sheet, _ = timeline([predicted(), measured], width=100)
    assert isinstance(sheet, Sheet)
    assert [row[:2] for row in sheet.rows[:3]] == [
        ("worker:0/cpu", "predicted"),
        ("", "measured"),
        ("worker:1/cpu", "predicted"),
    ]
    assert sheet.rows[0][2].endswith(" ")
    lengths = [len(row[2].rstrip()) for row in sheet.rows]
    assert lengths[1] > lengths[0]


def test_the_legend_names_what_is_there_and_no_more() -> None:
    """Remat only where something is rematerialised."""
    _, plain = timeline([predicted()], width=120)
    stages = tuple(replace(stage, rematerialise=stage.partitions) for stage in PLAN.stages)
    _, again = timeline([predicted(replace(PLAN, stages=stages))], width=120)
    assert isinstance(plain, Line)
    assert isinstance(again, Line)
    assert "remat" not in plain.text
    assert "= backward with remat" in again.text
    assert "█" not in again.text


def test_json_has_every_action() -> None:
    """As many as the program has, with what a message carries."""
    spans = predicted()
    measured = measured_spans(run_in(PROFILE, PLAN), PLAN, step=2)
    data = json.loads(json.dumps(timeline_data([spans, measured])))
    assert list(data) == ["predicted", "measured"]
    assert data["measured"]["steps"][0]["number"] == 2
    actions = data["predicted"]["actions"]
    assert len(actions) == len(data["measured"]["actions"]) == 3 * 17 + 2 * 2 * 2 * 8
    assert actions[0] == {
        "worker": "worker:0/cpu", "kind": "forward", "step": 0, "stage": 0, "micro_batch": 0, "start_s": 0.0,
        "end_s": pytest.approx(4e-3), "recomputes": False, "memory_bytes": None, "message": None,
    }  # fmt: skip
    sent = next(each for each in actions if each["kind"] == "send")
    assert sent["message"] == {
        "payload": "activation", "partition": "p1", "output": 0, "peer": "worker:1/cpu", "bytes": 2e5, "queued_s": 0.0,
    }  # fmt: skip
    assert actions[-1]["micro_batch"] is None
