"""What the page says of a plan's search, and when it says nothing of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan
from made_runs import slower_worker
from page_cases import page_plan, page_profile, searched

from assigner.formats.plan import ProfileReference
from assigner.report.page.document import page_html
from assigner.report.page.figures import page_data
from assigner.report.page.sections import cards, steps, summary
from assigner.report.page.shown import Shown, shown
from assigner.report.plan import status

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


@pytest.fixture
def profile() -> Profile:
    return page_profile()


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return page_plan(profile)


def test_what_a_search_found_goes_with_its_measurements(plan, profile):
    """With other measurements, or another placement, nothing of the old search is shown, and a line says why."""
    plan, slow = searched(plan, profile), slower_worker(profile, 0, forward=2.0, backward=2.0)
    mine = ProfileReference("mine.json", "aa")
    edited = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p1", "p2")), *plan.stages[1:]))
    told = ("equal split", "a wider link", "chosen", "bound of this plan", "with one stage a worker")

    def seen(page: Shown) -> str:
        return page_html([page], title="t", made_at="today").partition("<script")[0]

    html = seen(shown("a", plan, profile, source=mine))
    assert all(text in html for text in told)
    assert "solve again" not in html
    for each, by, source, kept in (
        (plan, slow, ProfileReference("slow.json", "bb"), ()), (edited, profile, mine, ("equal split",)),
    ):  # fmt: skip
        page = shown("a", each, by, source=source)
        assert [text for text in told if text in seen(page)] == list(kept)
        lines = [part.text for part in summary(page) if "solve again" in part.text]
        assert len(lines) == 1
        assert f"assigner solve {source.path}" in lines[0]
        data = page_data([page], title="t")["plans"][0]
        assert (data["splits"]["bound_s"], data["splits"]["candidates"], data["status"]) == (None, [], None)


def test_page_names_the_profile_that_priced_it(plan, profile):
    """File and hash are of the profile given; that which the plan was solved from stands beside it."""
    page = shown("a", searched(plan, profile), profile, source=ProfileReference("other.json", "bb"))
    html = page_html([page], title="t", made_at="today")
    assert "other.json" in html
    assert "sha256:bb" in html
    assert "mine.json · sha256:aa" in html


def test_a_bound_is_of_its_search(plan, profile):
    """A bound has its place among the bars; where a shown plan is below it, it is left out and the card says why."""
    good = shown("good", searched(plan, profile), profile)
    poor = make_plan(profile, [(1, ["p0", "p1", "p2", "p3", "p4", "p5"])])
    other = shown("poor", searched(poor, profile), profile)
    names = [row[0] for row in steps([good, other], good)[0].rows]
    assert names[:2] == ["bound of this plan's search", "good (this plan)"]
    assert "bound of this plan's search" not in [row[0] for row in steps([good, other], other)[0].rows]
    data = page_data([good, other], title="t")["plans"]
    assert data[0]["splits"]["bound_s"] == good.plan.solver.bound_s
    assert data[1]["splits"]["bound_s"] is None
    assert "another plan here is faster" in cards([good, other], other)[-1].note
    assert "another plan here" not in cards([good, other], good)[-1].note


def test_unlike_batches_compare_by_samples(plan, profile):
    """The speed-up is that of samples a second, and bars are of a sample."""
    big = replace(profile, workload=replace(profile.workload, batch_size=64))
    more = replace(plan, workload=big.workload, micro_batches=16)
    pages = [shown("one", plan, profile), shown("four", more, big)]
    rates = [page.predicted.samples_per_s for page in pages]
    assert page_data(pages, title="t")["plans"][1]["speed_up"] == pytest.approx(rates[1] / rates[0])
    sheet = steps(pages, pages[0])[0]
    assert sheet.columns[1].header.startswith("sample")
    assert sheet.rows[0][0] == "four"
    html = page_html(pages, title="t", made_at="today")
    assert f"{rates[1]:.0f}" in re.search("<fieldset.*?</fieldset>", html, re.DOTALL)[0]


def test_another_objective_has_its_own_proof(plan, profile):
    """A plan for another objective has no speed-up over baselines, and its status is what `show` says of it."""
    plan = searched(plan, profile, objective="throughput")
    page = shown("a", plan, profile)
    found = {card.label: card for card in cards([page], page)}
    assert "against the best baseline" not in found
    assert f"{found['solver'].value} {found['solver'].note}".startswith(status(plan.solver))
    assert "steady state" in found["solver"].note
