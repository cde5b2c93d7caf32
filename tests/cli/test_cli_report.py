import json
import re
from dataclasses import replace

import pytest

from assigner.formats.plan import file_hash, save_plan
from assigner.formats.profile import save_profile
from assigner.formats.trace import save_trace
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated
from assigner.validation.observed import rehearsed


@pytest.fixture
def trace(folder, solved, profile):
    """The trace of a run of solved.json, in the current folder."""
    cost = CostModel(profile)
    save_trace(rehearsed(simulated(solved, cost), cost, steps=2), folder / "trace.json")
    return "trace.json"


def test_writes_one_file(assigner, folder):
    """One plan gives one HTML file, and says on stderr what was written; stdout stays empty."""
    result = assigner("report", "solved.json", "-o", "report.html", "--profile", "profile.json", "--title", "Mine")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "wrote report.html" in result.stderr
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<title>Mine</title>" in text


def test_several_plans_with_a_run(assigner, folder, trace):
    """The first plan is the baseline; the trace goes to the plan that it is a run of."""
    options = ("-o", "report.html", "--profile", "profile.json", "--measured", trace)
    assert assigner("report", "equal.json", "solved.json", *options).exit_code == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "equal.json (baseline)" in text
    assert "2 of 6 partitions changed" in text
    assert "trace.json, a run of solved.json" in text


def test_json(assigner, solved, trace):
    """--json prints the page's figures and needs no file."""
    result = assigner("report", "equal.json", "solved.json", "--profile", "profile.json", "--measured", trace, "--json")
    data = json.loads(result.stdout)
    assert data["kind"] == "report"
    assert [plan["name"] for plan in data["plans"]] == ["equal.json", "solved.json"]
    assert data["plans"][1]["step_s"] == solved.predicted.step_s
    assert [len(plan["measured"]) for plan in data["plans"]] == [0, 1]


def test_profile_is_found(assigner, folder, solved, profile):
    """Without --profile the plan's own is taken, known by its hash."""
    result = assigner("solve", "profile.json", "-o", "made.json", "--micro-batches", "4")
    assert result.exit_code == 0
    assert assigner("report", "made.json", "-o", "report.html").exit_code == 0
    save_profile(replace(profile, warnings=("changed",)), folder / "profile.json", force=True)
    changed = assigner("report", "made.json", "-o", "other.html")
    assert changed.exit_code == 5
    assert "has changed since" in changed.stderr


def test_another_profile_is_named(assigner, folder, profile):
    """With --profile the page names that file and its hash, and leaves out what the search of another found."""
    assert assigner("solve", "profile.json", "-o", "made.json", "--micro-batches", "4").exit_code == 0
    slow = tuple(replace(each, forward_s=2 * each.forward_s) for each in profile.measurements)
    save_profile(replace(profile, measurements=slow), folder / "slow.json", force=True)
    assert assigner("report", "made.json", "-o", "report.html", "--profile", "slow.json").exit_code == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert file_hash(folder / "slow.json") in text
    assert "assigner solve slow.json -o PLAN" in text
    assert "against the best baseline" not in text


def test_wrong_uses(assigner, folder, equal, solved, trace):
    """Each wrong use has its exit code and a next step, and leaves no file behind."""
    save_plan(replace(solved, workload=replace(solved.workload, fingerprint="sha256:ff")), folder / "other.json")
    (folder / "there.html").write_text("mine")
    profile = ("--profile", "profile.json")
    for arguments, code, hint in (
        (("solved.json", *profile), 2, "name one: -o"),
        (("solved.json", "-o", "there.html", *profile), 2, "--force"),
        (("solved.json", "-o", "no/report.html", *profile), 2, "mkdir"),
        (("solved.json", "-o", "report.html"), 2, "--profile PROFILE"),
        (("missing.json", "-o", "report.html", *profile), 2, "plan file"),
        (("solved.json", "other.json", "-o", "report.html", *profile), 5, "one workload"),
        (("equal.json", "-o", "report.html", *profile, "--measured", trace), 5, "the run was started with"),
        (("solved.json", "-o", "report.html", *profile, "--measured", "equal.json"), 5, "reads a trace"),
    ):
        result = assigner("report", *arguments)
        assert result.exit_code == code, (arguments, result.stderr)
        assert result.stdout == ""
        assert hint in result.stderr
        assert len(re.findall("error:", result.stderr)) == 1
    assert not (folder / "report.html").exists()
    assert (folder / "there.html").read_text() == "mine"
    assert assigner("report", "solved.json", "-o", "there.html", *profile, "--force").exit_code == 0
