"""Plans with several workers a stage on screens, on the page and in other tools' forms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from brute_force import random_instance
from builders import make_plan

from assigner.errors import UsageError
from assigner.export.device_map import device_map
from assigner.export.graphviz import partition_drawing
from assigner.export.pipelining import module_names, schedule_csv
from assigner.export.torchgpipe import balance
from assigner.export.traceevents import trace_events
from assigner.formats.stage import Replica
from assigner.report.clock import clock_data
from assigner.report.page.figures import timeline_figures
from assigner.report.page.shown import shown
from assigner.report.placementchanges import placement_changes_data, same
from assigner.report.plan import stages
from assigner.report.timeline import timeline
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.simulate import priced, simulated
from assigner.schedule.timing import step_s
from assigner.validation.calibration import calibrated
from assigner.validation.comparison import agree
from assigner.validation.observed import rehearsed
from assigner.validation.spans import predicted_spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

ONE, TWO, OTHER = "worker:0/cpu", "worker:2/cpu", "worker:1/cpu"


def _example() -> tuple[Profile, Plan, Plan]:
    """A plan of two stages, and the same with the first one on two workers, 3 and 5 micro-batches of 8."""
    profile = random_instance(1, partitions=6, workers=3, busy=True, batch=16)
    plan = make_plan(profile, [(0, profile.order[:3]), (1, profile.order[3:])], micro_batches=8)
    plan = replace(plan, schedule="1f1b")
    first = replace(plan.stages[0], sole_worker=None, replicas=(Replica(ONE, 3), Replica(TWO, 5)))
    return profile, priced(plan, profile), priced(replace(plan, stages=(first, plan.stages[1])), profile)


def test_a_stage_has_a_row_for_each_of_its_workers() -> None:
    """With what it takes and keeps in flight; a plan with one worker a stage has no such column."""
    _, alone, both = _example()
    sheet = stages(both)
    assert "takes" in [column.header for column in sheet.columns]
    assert [row[:3] for row in sheet.rows] == [("0", ONE, "3"), ("", TWO, "5"), ("1", OTHER, "8")]
    assert "takes" not in [column.header for column in stages(alone).columns]


def test_the_clock_tells_replicas_apart() -> None:
    """Each of its stage's forwards and backwards says on which worker it is."""
    profile, _, both = _example()
    data = clock_data(both, profile)
    assert data is not None
    by = [each["worker"] for each in data["stages"][0]]
    assert (by.count(ONE), by.count(TWO)) == (6, 10)
    assert all("worker" not in each for each in data["stages"][1])


def test_other_shares_are_a_change() -> None:
    """Two plans whose replicas take otherwise do not do the same; nor does one without them."""
    _, alone, both = _example()
    turned = replace(both.stages[0], replicas=(Replica(ONE, 5), Replica(TWO, 3)))
    other = replace(both, stages=(turned, both.stages[1]))
    assert same(both, both)
    assert not same(both, other)
    changed = placement_changes_data(both, other)
    assert changed["settings_changed"] == {"shares of replicas": ["3+5", "5+3"]}
    moved = placement_changes_data(alone, both)["partitions_changed"][0]
    assert (moved["from"], moved["to"]) == (ONE, f"{ONE} + {TWO}")


def test_reductions_are_drawn_beside_what_workers_compute() -> None:
    """In the timeline, among the trace events and on the page: for each worker, and not as computing."""
    profile, _, both = _example()
    cost = CostModel(profile)
    spans = predicted_spans(simulated(both, cost), cost)
    assert sorted(span.worker for span in spans.spans if span.kind == "reduce") == [ONE, TWO]
    (sheet, *_) = timeline([spans], width=120)
    assert any("+" in cell for row in sheet.rows for cell in row)  # type: ignore[union-attr]
    events = trace_events([spans])["traceEvents"]
    tracks = {event["tid"] for event in events if event["name"] == "reduce of stage 0"}
    named = {event["tid"] for event in events if event["name"] == "thread_name" and "adds up" in event["args"]["name"]}
    assert len(tracks) == 2
    assert tracks == named
    data = timeline_figures(shown("it", both, profile))
    assert [row[:2] for row in sorted(data["reductions"])] == [[0, 0], [1, 0]]
    assert ActionKind.REDUCE not in [job[1] for job in data["jobs"]]


def test_a_run_that_goes_as_predicted_agrees_with_the_prediction() -> None:
    """Forwards, backwards, reductions and waits of a plan with replicas, read back from its own trace."""
    profile, _, both = _example()
    cost = CostModel(profile)
    trace = rehearsed(simulated(both, cost), cost, steps=3)
    found = agree(both, profile, trace)
    assert {each.kind for each in found.computes} == {"forward", "backward", "reduce", "update"}
    for each in found.computes:
        assert each.once.measured_s == pytest.approx(each.once.predicted_s)
    assert found.step.measured_s == pytest.approx(found.step.predicted_s)
    # one median of what is lost behind an action, though its messages go to one replica or to the other
    assert abs(found.explanation.unexplained_s) < 0.05 * found.step.predicted_s
    new = calibrated(profile, found, trace="a trace")
    assert step_s(both, CostModel(new)) == pytest.approx(found.step.measured_s, rel=0.05)


def test_the_drawing_names_all_workers_of_a_stage() -> None:
    """With what each of them takes."""
    profile, _, both = _example()
    text = partition_drawing(both, profile).text
    assert f"{ONE} on host0 takes 3, {TWO} on host2 takes 5" in text


@pytest.mark.parametrize("export", [balance, device_map, module_names, schedule_csv])
def test_tools_that_know_no_replicas_are_refused(export: Callable[[Plan, Profile], object]) -> None:
    """In words that name the stage and its workers."""
    profile, _, both = _example()
    with pytest.raises(UsageError, match=rf"stages\[0\]: several workers, {ONE}, {TWO}: not yet carried by "):
        export(both, profile)
