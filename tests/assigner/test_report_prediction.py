"""What `simulate` prints of a plan: the same as its own prediction, or what is another now and why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile

from assigner.report.prediction import prediction_data, prediction_report
from assigner.report.sheet import Line, Report, Sheet
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.simulate import priced, simulated, summary
from assigner.validation.spans import predicted_spans

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

PROFILE = make_profile(work=[2e-3] * 6, slowness=[1.0, 2.0])
PLAN = priced(make_plan(PROFILE, [(0, ["p0", "p1", "p2", "p3"]), (1, ["p4", "p5"])]), PROFILE)
MOVED = replace(PLAN, stages=make_plan(PROFILE, [(0, ["p0", "p1", "p2"]), (1, ["p3", "p4", "p5"])]).stages)


def report(plan: Plan, profile: Profile = PROFILE, *, memory: bool = False, **more) -> Report:
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    held = memory_over_time(timeline, cost) if memory else None
    more = {"own_profile": True, "width": 120, **more}
    return prediction_report(plan, profile, summary(timeline, cost), predicted_spans(timeline, cost), held, **more)


def lines(parts: Report) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, Line))


def sheet(parts: Report, title: str) -> Sheet:
    return next(part for part in parts if isinstance(part, Sheet) and part.title.startswith(title))


def test_an_unchanged_plan_has_no_columns_of_changes() -> None:
    """One line says that it is the same."""
    parts = report(PLAN)
    assert "priced with the profile it was solved from: the same as the plan's own prediction" in lines(parts)
    workers = sheet(parts, "workers")
    assert "+/- %" not in [column.header for column in workers.columns]
    assert workers.rows[0][:4] == ("worker:0/cpu", "host0", "0", "4")


@pytest.mark.parametrize(
    ("own", "words"),
    [(True, "the plan was changed since"), (False, "another profile than"), (None, "the profile that was named")],
)
def test_a_changed_plan_says_by_how_much_and_why(own: bool | None, words: str) -> None:
    """The plan's own figures beside the new ones, and each worker's change."""
    parts = report(MOVED, own_profile=own)
    text = lines(parts)
    assert "the plan itself says: step" in text
    assert "% slower now" in text
    assert words in text
    workers = sheet(parts, "workers")
    places = [n for n, column in enumerate(workers.columns) if column.header == "+/- %"]
    assert [[row[n] for n in places] for row in workers.rows] == [["-25.0", "-25.2"], ["+50.0", "+50.0"]]
    assert {column.header for column in workers.fitted(80).columns} >= {"+/- %", "memory %"}


def test_memory_that_changed_is_told_even_at_the_same_speed() -> None:
    """A plan that now keeps more, and is as fast."""
    first, second = PLAN.predicted.workers
    stored = replace(PLAN.predicted, workers=(replace(first, peak_bytes=first.peak_bytes / 2), second))
    text = lines(report(replace(PLAN, predicted=stored)))
    assert "as fast as before" in text


def test_a_worker_without_a_stage_is_named() -> None:
    """One that the plan's own prediction has, and the plan has no longer."""
    alone = replace(PLAN, stages=make_plan(PROFILE, [(0, [f"p{n}" for n in range(6)])]).stages)
    assert "without a stage now: worker:1/cpu" in lines(report(alone))


def test_a_plan_that_was_never_priced() -> None:
    """It has nothing to compare with."""
    parts = report(replace(PLAN, predicted=None))
    assert "no prediction of its own" in lines(parts)


def test_json_has_the_micro_batches_in_flight_and_every_action() -> None:
    """Under 1f1b two in flight on the first of two stages."""
    plan = replace(PLAN, schedule="1f1b")
    cost = CostModel(PROFILE)
    timeline = simulated(plan, cost)
    data = prediction_data(plan, summary(timeline, cost), predicted_spans(timeline, cost), own_profile=None)
    assert data["in_flight"] == [2, 1]
    assert data["own_profile"] is None
    assert len(data["timeline"]["predicted"]["actions"]) == 2 * 9 + 2 * 2 * 4


def test_of_many_links_the_busiest_are_shown() -> None:
    """Eight rows, and how many more there are."""
    profile = make_profile(work=[2e-3] * 8, slowness=[1.0] * 8, edge_bytes=1e5)
    plan = priced(make_plan(profile, [(n, [f"p{n}"]) for n in range(8)]), profile)
    parts = report(plan, profile)
    assert len(sheet(parts, "messages").rows) == 8
    assert "and 6 links that are less busy" in lines(parts)


def test_several_overfull_workers_are_counted() -> None:
    """The worst by name, and how many more."""
    tiny = replace(PROFILE, workers=tuple(replace(each, memory_bytes=1e6) for each in PROFILE.workers))
    assert "does not fit: worker:0/cpu needs" in lines(report(PLAN, tiny))
    assert "and 1 more worker" in lines(report(PLAN, tiny))


def test_all_tables_fit_80_columns() -> None:
    """Changed or not, with memory over time."""
    for plan in (PLAN, MOVED):
        for part in report(plan, memory=True, width=80):
            if isinstance(part, Sheet):
                fitted = part.fitted(80)
                assert sum(fitted._needed(n) for n in range(len(fitted.columns))) + 2 * (len(fitted.columns) - 1) <= 80
