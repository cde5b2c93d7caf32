"""The figures and the file of `assigner report`, without a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import CAPACITY, make_plan, make_profile
from drawn_orders import with_drawn_order
from drawn_plans import drawn, replicated
from made_runs import with_busy
from page_cases import page_plan, page_profile, read_back

from assigner import formatting as fmt
from assigner.formats.solverreport import Baseline, WhatIf
from assigner.report.page.document import page_html
from assigner.report.page.figures import page_data
from assigner.report.page.markup import STEPS, heat_maps, json_html, parts_html
from assigner.report.page.sections import critical_sheet, starts_sheet
from assigner.report.page.shown import shown
from assigner.report.sheet import Column, Line, Sheet
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import critical_path
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.program import ActionKind
from assigner.schedule.simulate import predict, priced, simulated, step_s

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

SCHEDULES = ("gpipe", "1f1b", "interleaved")
PARTS = {"forward", "backward", "backward_input", "backward_weight"}


@pytest.fixture
def profile() -> Profile:
    return page_profile()


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return page_plan(profile)


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
    found = {each.micro_batches: each for each in shown("plan", plan, profile).splits}
    assert list(found) == [1, 2, 3, 4, 6, 8, 16]
    assert found[4].step_s == predict(plan, profile).step_s
    assert found[8].step_s == step_s(replace(plan, micro_batches=8, micro_batch_size=2), CostModel(profile))
    assert found[4].measured
    assert not found[8].measured
    tight = replace(profile, workers=tuple(replace(each, memory_bytes=6e7) for each in profile.workers))
    assert [each.micro_batches for each in shown("plan", plan, tight).splits if not each.fits] == [1]


def test_a_listed_plan_with_parts_and_replicas_is_shown():
    """Its page has every action; fewer micro-batches are priced by the orders' beginning, and more say why not."""
    for seed in range(4):
        whole, named = replicated(*drawn(seed, "interleaved"), seed)
        drawn_profile = replace(
            whole,
            measurements=tuple(
                replace(each, backward_input_s=each.backward_s / 2, backward_weight_s=each.backward_s / 2,
                        waiting_bytes=each.activation_bytes / 2)
                for each in whole.measurements
            ),
        )  # fmt: skip
        drawn_plan = with_drawn_order(named, drawn_profile.edges, random.Random(seed), halves=True)
        count, cost = drawn_plan.micro_batches, CostModel(drawn_profile)
        page = shown("plan", drawn_plan, drawn_profile)
        data = json.loads(json.dumps(page_data([page], title="t")))["plans"][0]
        found = Counter((worker, kind, stage, m) for worker, kind, stage, m, *_ in read_back(data) if kind in PARTS)
        events = [(event.worker, event.action) for event in simulated(drawn_plan, cost).events]
        assert found == Counter(
            (worker, action.kind.value, action.stage, action.micro_batch)
            for worker, action in events
            if action.kind.value in PARTS
        )
        assert {kind for _, kind, *_ in found} == PARTS
        assert "lists its orders for" in page_html([page], title="t", made_at="") or count == 16
        for each in page.splits:
            assert (each.step_s is None) == (each.micro_batches > count)
            assert each.step_s is not None or each.why == f"the plan lists its orders for {count} micro-batches"
        assert {each.micro_batches: each.step_s for each in page.splits}[count] == step_s(drawn_plan, cost)
        size = drawn_plan.micro_batch_size
        here = tuple(
            each
            if each.micro_batch == size
            else replace(each, backward_input_s=None, backward_weight_s=None, waiting_bytes=None)
            for each in drawn_profile.measurements
        )
        some = {each.why for each in shown("plan", drawn_plan, replace(drawn_profile, measurements=here)).splits}
        assert "the parts of backwards were not measured there" in some


def test_sizes_that_cannot_be_priced_say_why(plan, profile):
    """Where the profile has one size alone, other micro-batch counts have no step time but a reason."""
    lone = tuple(each for each in profile.measurements if each.micro_batch == 4)
    found = {each.micro_batches: each for each in shown("plan", plan, replace(profile, measurements=lone)).splits}
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
    maps = heat_maps(shown("plan", plan, replace(profile, links=fast)))
    rate, wait, sent = (re.findall(r'<td class="([^"]*)">(.*?)</td>', each) for each in maps)
    assert rate[1][0] == f"heat{STEPS - 1} used"
    assert wait[1][0].startswith("heat0")
    assert rate[5][0].startswith("heat0")
    assert rate[2][0].startswith("heat")
    assert "used" not in rate[2][0]
    assert rate[6] == rate[0] == ("", "")
    assert sent[1][1] != "·" == sent[2][1]


def test_busy_time_is_in_the_jobs(plan, profile):
    """Each job says how long its messages keep its worker busy after it: what the simulator says."""
    held = with_busy(profile, 0.5)
    page = shown("plan", plan, held)
    line = page_data([page], title="t")["plans"][0]["timeline"]
    said = sum(line["jobs"][job][7] for job, *_ in line["events"])
    assert said == pytest.approx(sum(each.busy_s for each in page.timeline.events if each.action.route is None))
    assert said > 0


def test_sizes_that_are_not_plausible_have_no_step_time(plan, profile):
    """Where the line of two noisy sizes promises small ones for nothing, the curve leaves them out and says why."""
    stretched = tuple(
        replace(each, micro_batch={1: 4, 4: 8}[each.micro_batch], forward_s={1: 1e-3, 4: 3e-3}[each.micro_batch],
                backward_s={1: 2e-3, 4: 6e-3}[each.micro_batch])
        for each in profile.measurements
    )  # fmt: skip
    found = {each.micro_batches: each for each in shown("plan", plan, replace(profile, measurements=stretched)).splits}
    assert found[2].step_s
    assert found[4].step_s
    assert found[8].step_s is found[16].step_s is None
    assert "not plausible" in found[8].why


def test_starts_are_in_the_file(plan, profile):
    """When each micro-batch starts at each stage stands in the page without scripts."""
    page = shown("plan", plan, profile)
    sheet = starts_sheet(page)[0]
    assert len(sheet.rows) == plan.micro_batches
    unit = fmt.time_unit(page.timeline.step_s)
    heads = [column.header for column in sheet.columns]
    for event in page.timeline.events:
        if event.action.stage >= 0 and event.action.route is None:
            column = heads.index(f"{event.action.kind.value} {event.action.stage}")
            assert sheet.rows[event.action.micro_batch][column] == unit.show(event.start_s)
    many = replace(plan, workload=replace(plan.workload, batch_size=2048), micro_batches=1024, micro_batch_size=2)
    assert isinstance(starts_sheet(replace(page, plan=many))[0], Line)


def test_splits_are_priced_once(plan, profile, monkeypatch):
    """However often a page needs its placement at other numbers of micro-batches, they are priced once."""
    calls = []
    monkeypatch.setattr("assigner.report.page.shown.step_s", lambda *args: calls.append(args) or step_s(*args))
    page_html([shown("plan", plan, profile)], title="t", made_at="today")
    assert len(calls) == 7


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
        priced(plan, profile), baselines=(Baseline("equal split", 0.5), Baseline("best single worker", None)),
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
    assert all(event.action.kind is not ActionKind.SEND for event in page.timeline.events)
