"""The figures and the file of `assigner report`, without a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import CAPACITY, make_plan, make_profile
from drawn_plans import drawn

from assigner.agreement import rehearsed
from assigner.cost import CostModel
from assigner.errors import FormatError
from assigner.occupancy import memory_over_time
from assigner.plan import Baseline, Plan, WhatIf
from assigner.report.comparison import Named
from assigner.report.page import page_data, page_html, runs_of, shown
from assigner.report.page.critical import critical_path, critical_sheet
from assigner.report.page.links import STEPS, matrices
from assigner.report.page.markup import json_html, parts_html
from assigner.report.page.splits import splits
from assigner.report.sheet import Column, Line, Sheet
from assigner.schedule import Kind
from assigner.simulate import predict, simulated, step_s

if TYPE_CHECKING:
    from assigner.profile import Profile

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@pytest.fixture
def profile() -> Profile:
    return make_profile(work=[2e-3, 3e-3, 1e-3, 4e-3, 2e-3, 2e-3], slowness=[1.0, 2.0, 1.5], batch=16, busy=0.2)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    """Three stages under 1f1b, one partition rematerialised."""
    made = make_plan(profile, [(0, ["p0", "p1", "p2"]), (1, ["p3"]), (2, ["p4", "p5"])])
    stages = (replace(made.stages[0], rematerialise=("p1",)), *made.stages[1:])
    return replace(made, schedule="1f1b", stages=stages)


def read_back(data: dict) -> list[tuple]:
    """(worker, kind, stage, micro-batch, start, end) of every action and message, from the page's tables."""
    line = data["timeline"]
    found = []
    for job, m, start in line["events"]:
        worker, kind, stage, seconds, *_ = line["jobs"][job]
        found.append((line["workers"][worker], kind, stage, m, start, start + seconds))
    for route, m, start in line["messages"]:
        payload, _, _, source, _, _, seconds = line["routes"][route]
        found.append((line["workers"][source], payload, None, m, start, start + seconds))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_timeline_is_the_simulators(seed, schedule):
    """Every action and message of the simulator is in the page, with its start and its end."""
    drawn_profile, drawn_plan = drawn(seed, schedule)
    page = shown("plan", drawn_plan, drawn_profile)
    data = json.loads(json.dumps(page_data([page], title="t")))["plans"][0]
    wanted = [
        (event.worker, event.action.route.payload.value, None, event.action.micro_batch, event.start_s, event.end_s)
        if event.action.route
        else (event.worker, event.action.kind.value, event.action.stage, event.action.micro_batch, event.start_s,
              event.end_s)
        for event in simulated(drawn_plan, CostModel(drawn_profile)).events
    ]  # fmt: skip
    found, wanted = sorted(read_back(data), key=str), sorted(wanted, key=str)
    assert len(found) == len(wanted)
    by_name = {each[:4]: [] for each in wanted}
    for each in found:
        by_name[each[:4]].append(each[4:])
    for each in wanted:
        assert any(times == pytest.approx(each[4:], abs=2e-9) for times in by_name[each[:4]]), each
    assert data["timeline"]["step_s"] == data["step_s"] == predict(drawn_plan, drawn_profile).step_s


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_critical_path_is_as_long_as_the_step(seed, schedule):
    """The path has no gap: what is on it, with the time that workers are busy with messages, adds up to the step."""
    drawn_profile, drawn_plan = drawn(seed, schedule)
    timeline = simulated(drawn_plan, CostModel(drawn_profile))
    path = [timeline.events[n] for n in critical_path(timeline)]
    assert path[0].start_s == 0
    assert path[-1].end_s == timeline.step_s
    for before, after in itertools.pairwise(path):
        gap = before.busy_s if after.action.route is None and after.worker == before.worker else 0.0
        assert after.start_s == before.end_s + gap
    shares = [float(row[4].rpartition(" ")[0].split()[-1]) for row in critical_sheet(timeline).rows]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_recompute_is_part_of_a_backward(plan, profile):
    """A backward says how much of it is recomputing: what the cost model says of the partition."""
    line = page_data([shown("plan", plan, profile)], title="t")["plans"][0]["timeline"]
    again = {(job[1], job[2]): job[4] for job in line["jobs"]}
    cost = CostModel(profile).partition("p1", plan.stages[0].worker, plan.micro_batch_size)
    assert again["backward", 0] == cost.recompute_s > 0
    assert again["backward", 1] == again["forward", 0] == 0


def test_memory_is_the_simulators(plan, profile):
    """Every moment of every worker has the bytes that the simulator gives it, and the peak is the highest of them."""
    page = shown("plan", plan, profile)
    found = page_data([page], title="t")["plans"][0]["memory"]
    cost = CostModel(profile)
    for each, held in zip(found, memory_over_time(simulated(plan, cost), cost), strict=True):
        levels = [each["levels"][level] for _, level in each["moments"]]
        assert levels == [[round(now.activations), round(now.workspace), round(now.messages)] for now in held.held]
        assert each["peak_bytes"] == pytest.approx(sum(each["always"].values()) + max(map(sum, levels)), abs=2)
        assert each["capacity_bytes"] == CAPACITY


def test_splits_price_the_same_placement(plan, profile):
    """Each number of micro-batches has the simulator's step time; the plan's own is the plan's; memory may forbid."""
    found = {each.micro_batches: each for each in splits(shown("plan", plan, profile))}
    assert list(found) == [1, 2, 3, 4, 6, 8, 16]
    assert found[4].step_s == predict(plan, profile).step_s
    assert found[8].step_s == step_s(replace(plan, micro_batches=8, micro_batch_size=2), CostModel(profile))
    assert found[4].measured
    assert not found[8].measured
    tight = replace(profile, workers=tuple(replace(each, memory_bytes=6e7) for each in profile.workers))
    assert [each.micro_batches for each in splits(shown("plan", plan, tight)) if not each.fits] == [1]


def test_sizes_that_cannot_be_priced_say_why(plan, profile):
    """Where the profile has one size alone, other micro-batch counts have no step time but a reason."""
    lone = tuple(each for each in profile.measurements if each.micro_batch == 4)
    found = {each.micro_batches: each for each in splits(shown("plan", plan, replace(profile, measurements=lone)))}
    assert found[4].step_s is not None
    assert found[8].step_s is None
    assert "only micro-batch 4" in found[8].why


def test_link_matrix(plan, profile):
    """Links are shaded from slow to fast, those that the plan uses are marked, pairs that cannot talk are empty."""
    fast = tuple(
        replace(link, points=tuple(replace(point, seconds=point.seconds / 10) for point in link.points))
        if (link.source, link.target) == ("worker:0/cpu", "worker:1/cpu")
        else link
        for link in profile.links
        if (link.source, link.target) != ("worker:2/cpu", "worker:0/cpu")
    )
    rate, wait, sent = matrices(shown("plan", plan, replace(profile, links=fast)))
    assert rate.rows[0][1].shade == STEPS - 1
    assert wait.rows[0][1].shade == 0
    assert rate.rows[1][2].shade == 0
    assert rate.rows[0][1].used
    assert not rate.rows[0][2].used
    assert rate.rows[2][0].text == rate.rows[0][0].text == ""
    assert sent.rows[0][1].text != "·" == sent.rows[0][2].text


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


def test_a_trace_goes_to_its_plan(plan, profile):
    """A trace is put to the plan that it is a run of; one of another plan is refused by name."""
    other = make_plan(profile, [(0, ["p0"]), (1, ["p1", "p2", "p3", "p4", "p5"])])
    cost = CostModel(profile)
    trace = rehearsed(simulated(other, cost), cost)
    both = [Named("one.json", plan), Named("two.json", other)]
    assert runs_of(both, [("t.json", trace)]) == [[], [("t.json", trace)]]
    with pytest.raises(FormatError, match=r"t\.json is of a run of none of these plans"):
        runs_of(both[:1], [("t.json", trace)])


def test_data_cannot_leave_its_element():
    """No name can end the script element, begin a comment, or end a line of JavaScript; it is read back unchanged."""
    nasty = ["</script><img src=x onerror=alert(1)>", "<!--", "]]>", "a\u2028b\u2029c", "&lt;", '"\\']
    text = json_html(nasty)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == nasty


def test_names_are_text_in_tables():
    """What a sheet or a line says is text in the page, never markup."""
    sheet = Sheet("<b>", (Column("<i>", "name"),), (("<script>",),))
    html = parts_html((sheet, Line("<u>", "strong")))
    assert not re.search("<(b|i|u|script)>", html)
    assert "&lt;script&gt;" in html


def test_page_names_its_scripts_and_loads_nothing(plan, profile):
    """The policy has the hash of just the scripts and the style in the page; nothing refers to another place."""
    html = page_html([shown("plan.json", plan, profile)], title="A <title>", made_at="today")
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#x27;", "'")
    assert "default-src 'none'" in policy
    scripts = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2
    for text in (*scripts, *re.findall("<style>(.*?)</style>", html, re.DOTALL)):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    outside = html.replace(scripts[0], "").replace(scripts[1], "")
    assert all(place.startswith(("#", "data:")) for place in re.findall(r'(?:src|href)="([^"]*)"', outside))
    assert not re.search(r'style="|<link rel="stylesheet|@import|url\(', outside)
    assert "A &lt;title&gt;" in html


def test_everything_is_in_the_page_without_scripts(plan, profile):
    """Baselines, what-ifs, stages, settings and what moved stand in the file as tables."""
    plan = replace(
        plan, baselines=(Baseline("equal split", 0.5), Baseline("best single worker", None)),
        what_if=(WhatIf("link", "the link worker:0 to worker:1 twice as fast", 0.4, 0.39),),
    )  # fmt: skip
    other = make_plan(profile, [(0, ["p0"]), (1, ["p1", "p2", "p3", "p4", "p5"])])
    html = page_html([shown("a", other, profile), shown("b", plan, profile)], title="t", made_at="today")
    for text in ("equal split", "not possible", "the link worker:0 to worker:1 twice as fast", "b against a", "p4, p5"):
        assert text in html
    assert html.count('data-plan="1"') == html.count('data-plan="0"') >= 7


def test_plan_of_one_worker(profile):
    """A plan without messages has a page all the same."""
    alone = make_plan(profile, [(0, ["p0", "p1", "p2", "p3", "p4", "p5"])])
    page = shown("plan", alone, make_profile(work=[1e-3] * 6, slowness=[1.0], batch=16))
    html = page_html([page], title="t", made_at="today")
    assert "nothing is sent" in html
    assert all(event.action.kind is not Kind.SEND for event in page.timeline.events)
