"""Traced runs in the page: which steps, on which clock, beside which prediction."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan
from made_runs import run_in, slower_link
from page_cases import page_plan, page_profile, read_back

from assigner.errors import FormatError
from assigner.report.comparison import Named
from assigner.report.page.document import page_html
from assigner.report.page.figures import page_data
from assigner.report.page.sections import cards
from assigner.report.page.shown import runs_of, shown
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated
from assigner.validation.observed import rehearsed

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


@pytest.fixture
def profile() -> Profile:
    return page_profile()


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return page_plan(profile)


def test_measured_steps_are_in_the_steps_own_time(plan, profile):
    """A run that goes as predicted has its median step drawn just as the prediction, wherever that stands."""
    cost = CostModel(profile)
    trace = rehearsed(simulated(plan, cost), cost, steps=3)
    page = shown("plan", plan, profile, [("t.json", trace)])
    data = page_data([page], title="t")["plans"][0]
    run = data["measured"][0]
    assert run["step_s"] == pytest.approx([data["step_s"]] * 3)
    predicted = {each[:4]: each[4:] for each in read_back(data)}
    workers = data["timeline"]["workers"]
    assert len(run["steps"][0]["actions"]) == len(data["timeline"]["events"])
    for job, m, start, length in run["steps"][0]["actions"]:
        worker, kind, stage, *_ = data["timeline"]["jobs"][job]
        times = (1e-6 * start, 1e-6 * (start + length))
        assert predicted[workers[worker], kind, stage, m] == pytest.approx(times, abs=1.5e-6)
    assert len(run["steps"][0]["messages"]) == len(data["timeline"]["messages"])


def test_messages_are_compared_by_their_time_on_the_link(plan, profile):
    """Where messages queue for a slow link, a run as predicted has each on the link just as long as predicted."""
    slow = slower_link(profile, 0, 1, 60.0)
    page = shown("plan", plan, slow, [("t.json", run_in(slow, plan))])
    data = page_data([page], title="t")["plans"][0]
    routes, step = data["timeline"]["routes"], data["measured"][0]["steps"][0]
    said = {(route, m): (start, routes[route][6]) for route, m, start in data["timeline"]["messages"]}
    assert max(queued for *_, queued in step["messages"]) > 1000
    for route, m, start, length, _ in step["messages"]:
        assert (1e-6 * start, 1e-6 * length) == pytest.approx(said[route, m], abs=2e-6)


def test_waits_are_the_workers_own(plan, profile):
    """A measured step has the waits that its workers noted: all idle time of the prediction but the end of the step."""
    page = shown("plan", plan, profile, [("t.json", run_in(profile, plan))])
    data = page_data([page], title="t")["plans"][0]
    waits = data["measured"][0]["steps"][0]["waits"]
    for n, each in enumerate(page.predicted.workers):
        busy = sum(e.busy_s for e in page.timeline.events if e.worker == each.worker and e.action.route is None)
        ended = max(e.end_s + e.busy_s for e in page.timeline.events if e.worker == each.worker and not e.action.route)
        waited = sum(1e-6 * length for worker, *_, length in waits if worker == n)
        assert waited == pytest.approx(ended - each.compute_s - busy, abs=1e-4)


def test_another_rematerialisation_is_drawn_as_it_was_run(plan, profile):
    """A run that rematerialised everything stands beside the plan simulated so, and the page says that it did."""
    everything = replace(plan, stages=tuple(replace(each, rematerialise=each.partitions) for each in plan.stages))
    trace = replace(run_in(profile, everything), stages=plan.stages, remat="always")
    page = shown("plan", plan, profile, [("t.json", trace)])
    data = page_data([page], title="t")["plans"][0]
    run = data["measured"][0]
    line = run["as_run"]["timeline"]
    assert data["timeline"]["step_s"] < line["step_s"] == pytest.approx(run["steps"][0]["step_s"])
    lengths = {job: 1e-6 * length for job, _, _, length in run["steps"][0]["actions"]}
    assert {job: line["jobs"][job][3] for job in lengths} == pytest.approx(lengths, abs=2e-6)
    assert run["as_run"]["memory"] != data["memory"]
    assert "rematerialised every partition" in run["said"]
    card = next(each for each in cards([page], page) if each.label == "measured step")
    assert "predicted as it was run" in card.note
    assert "rematerialised every partition" in card.note
    as_planned = shown("plan", plan, profile, [("t.json", run_in(profile, plan))])
    run = page_data([as_planned], title="t")["plans"][0]["measured"][0]
    assert (run["as_run"], run["said"]) == (None, "")
    trace = run_in(profile, plan)
    trace = replace(trace, workers=(replace(trace.workers[0], starved=0.4), *trace.workers[1:]))
    (run,) = page_data([shown("plan", plan, profile, [("t.json", trace)])], title="t")["plans"][0]["measured"]
    assert run["said"].startswith("t.json: the run was on a busy machine: other programs had up to 40 % of the time of")


def test_a_trace_goes_to_its_plan(plan, profile):
    """A trace is put to the plan that it is a run of; one of another plan is refused by name."""
    other = make_plan(profile, [(0, ["p0"]), (1, ["p1", "p2", "p3", "p4", "p5"])])
    cost = CostModel(profile)
    trace = rehearsed(simulated(other, cost), cost)
    both = [Named("one.json", plan), Named("two.json", other)]
    assert runs_of(both, [("t.json", trace)]) == [[], [("t.json", trace)]]
    with pytest.raises(FormatError, match=r"t\.json is of a run of none of these plans"):
        runs_of(both[:1], [("t.json", trace)])


def test_a_trace_counts_once_where_plans_run_alike(plan, profile):
    """Of a run of two plans that are alike each step is counted once."""
    trace = run_in(profile, plan, steps=7)
    pages = [shown(name, plan, profile, [("t.json", trace)]) for name in ("a.json", "b.json")]
    html = page_html(pages, title="t", made_at="today")
    table = next(each for each in re.findall("<figure.*?</figure>", html, re.DOTALL) if "in the traces" in each)
    assert re.findall(r'</th><td class="number">(\d+)</td>', table) == ["7", "7"]
