import hashlib
import json
from dataclasses import replace

import pytest
from made_runs import run_in

from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile
from assigner.formats.trace import save_trace


def test_baseline_and_speed_up(assigner, equal, solved):
    """The first plan is marked as the baseline, and the second has its speed-up over it."""
    out = assigner("compare", "equal.json", "solved.json").stdout
    factor = equal.predicted.step_s / solved.predicted.step_s
    rows = {line.split()[0]: line.split() for line in out.splitlines()[:6] if ".json" in line}
    assert "baseline" in rows["equal.json"]
    assert f"{factor:.2f}x" in rows["solved.json"]


def test_only_changes_are_listed(assigner):
    """Below the table stands what moved, and nothing that stayed."""
    out = assigner("compare", "equal.json", "solved.json").stdout
    assert "2 of 6 partitions changed" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["p3", "worker:1/cpu", "->", "worker:0/cpu"] in rows
    assert ["p4", "worker:1/cpu", "->", "worker:0/cpu", "off", "->", "on"] in rows
    assert not any(row[:1] == ["p5"] for row in rows)


def test_all_lists_every_partition(assigner):
    """--all lists the partitions that stayed as well."""
    rows = [line.split() for line in assigner("compare", "equal.json", "solved.json", "--all").stdout.splitlines()]
    assert ["p5", "worker:1/cpu", "stays"] in rows


def test_json(assigner, equal, solved):
    """--json has the figures of each plan and the changes by partition."""
    data = json.loads(assigner("compare", "equal.json", "solved.json", "--json").stdout)
    assert data["differ"]
    assert data["plans"][1]["speed_up"] == pytest.approx(equal.predicted.step_s / solved.predicted.step_s)
    assert data["plans"][1]["partitions_changed"][1] == {
        "partition": "p4", "from": "worker:1/cpu", "to": "worker:0/cpu", "remat": [False, True],
    }  # fmt: skip


def test_markdown(assigner):
    """--md gives tables that Markdown knows, all columns in them."""
    lines = assigner("compare", "equal.json", "solved.json", "--md", columns=80).stdout.splitlines()
    header = next(line for line in lines if "| plan |" in line)
    assert "transfer %" in header
    assert lines[lines.index(header) + 1].count("---") == header.count("|") - 1


def test_exit_code_tells_whether_plans_differ(assigner, folder, solved):
    """--exit-code gives 1 for other placements, 0 for one plan twice, whatever its prediction says."""
    save_plan(replace(solved, predicted=None, solver=None), folder / "again.json")
    assert assigner("compare", "equal.json", "solved.json", "--exit-code").exit_code == 1
    assert assigner("compare", "equal.json", "solved.json").exit_code == 0
    result = assigner("compare", "solved.json", "again.json", "--exit-code")
    assert result.exit_code == 0
    assert "does the same" in result.stdout


def test_other_workload_is_refused(assigner, folder, solved):
    """Plans of two workloads cannot be compared: exit code 5, nothing on stdout."""
    other = replace(solved, workload=replace(solved.workload, fingerprint="sha256:ff"))
    save_plan(other, folder / "other.json")
    result = assigner("compare", "solved.json", "other.json")
    assert result.exit_code == 5
    assert result.stdout == ""
    assert "sha256:ff" in result.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_width(assigner, columns):
    """Three plans fit on 80 and on 120 columns, and the baseline stays marked."""
    out = assigner("compare", "equal.json", "solved.json", "solved.json", columns=columns).stdout
    assert max(map(len, out.splitlines())) <= columns
    assert "baseline" in out
    header = next(line for line in out.splitlines() if "speed-up" in line)
    assert ("transfer %" in header) == (columns == 120)


def test_measured_finds_the_plan_of_each_trace(assigner, folder, profile, equal, solved):
    """Traces are told apart by what they ran; median, speed-up and the prediction's error stand below the figures."""
    for name, plan in (("equal", equal), ("solved", solved)):
        save_trace(run_in(profile, plan), folder / f"{name}.trace.json")
    traces = ("--measured", "solved.trace.json", "--measured", "equal.trace.json")
    out = assigner("compare", "equal.json", "solved.json", *traces, columns=80).stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "measured ms" in out
    assert "the plans ran in the order that was predicted" in out
    data = json.loads(assigner("compare", "equal.json", "solved.json", *traces, "--json").stdout)
    assert [each["measured"]["traces"] for each in data["plans"]] == [["equal.trace.json"], ["solved.trace.json"]]
    assert data["plans"][1]["measured"]["error"] == pytest.approx(0, abs=0.02)


def test_a_trace_of_another_plan_is_refused(assigner, folder, profile, equal, solved):
    """Exit code 5, nothing on stdout, and what differs."""
    save_plan(replace(equal, schedule="1f1b"), folder / "other.json")
    save_trace(run_in(profile, solved), folder / "trace.json")
    result = assigner("compare", "equal.json", "other.json", "--measured", "trace.json")
    assert (result.exit_code, result.stdout) == (5, "")
    assert "trace.json is of a run of none of these plans" in result.stderr


@pytest.mark.parametrize("wanted", ["2", "solved.json"])
def test_another_baseline(assigner, equal, solved, wanted):
    """By its number or its name, it comes first and is the measure."""
    data = json.loads(assigner("compare", "equal.json", "solved.json", "--baseline", wanted, "--json").stdout)
    assert data["baseline"] == "solved.json"
    assert data["plans"][1]["speed_up"] == pytest.approx(solved.predicted.step_s / equal.predicted.step_s)


def test_a_baseline_that_is_none_of_the_plans(assigner):
    """Exit code 2, and the plans by number."""
    result = assigner("compare", "equal.json", "solved.json", "--baseline", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1 equal.json, 2 solved.json" in result.stderr


def test_all_priced_by_one_profile(assigner, folder, profile):
    """--profile prices every plan anew, and says so."""
    points = (
        replace(each, forward_s=2 * each.forward_s, backward_s=2 * each.backward_s) for each in profile.measurements
    )
    save_profile(replace(profile, measurements=tuple(points)), folder / "slow.json")
    old, new = (
        json.loads(assigner("compare", "equal.json", "solved.json", *more, "--json").stdout)
        for more in ((), ("--profile", "slow.json"))
    )
    assert new["plans"][1]["step_s"] > 1.5 * old["plans"][1]["step_s"]
    assert new["notes"] == ["all are priced by slow.json, whatever they were solved from"]


def test_prices_of_the_profile_behind_a_plan(assigner, folder, profile, equal, solved):
    """Where the profile is at hand and knows what workers cost, every plan has its cost."""
    prices = replace(profile, workers=tuple(replace(each, cost_per_hour=2.0) for each in profile.workers))
    save_profile(prices, folder / "prices.json")
    reference = ProfileReference("prices.json", hashlib.sha256((folder / "prices.json").read_bytes()).hexdigest())
    for name, plan in (("a.json", equal), ("b.json", solved)):
        save_plan(replace(plan, profile=reference), folder / name)
    assert "per 1000" in assigner("compare", "a.json", "b.json").stdout
    assert "per 1000" not in assigner("compare", "equal.json", "solved.json").stdout


def test_names_tell_plans_of_one_file_name_apart(assigner, folder, equal, solved):
    """Of their paths only what differs; one file twice is numbered."""
    for name, plan in (("one", equal), ("two", solved)):
        (folder / "runs" / name).mkdir(parents=True)
        save_plan(plan, folder / "runs" / name / "plan.json")
    data = json.loads(assigner("compare", "runs/one/plan.json", "runs/two/plan.json", "--json").stdout)
    assert [each["name"] for each in data["plans"]] == ["one", "two"]
    again = json.loads(assigner("compare", "equal.json", "equal.json", "--json").stdout)
    assert [each["name"] for each in again["plans"]] == ["equal.json (1)", "equal.json (2)"]


def test_precision(assigner):
    """Digits behind the point, as dvc has it."""
    lines = assigner("compare", "equal.json", "solved.json", "--precision", "4").stdout.splitlines()
    row = next(line.split() for line in lines if line.startswith("solved.json"))
    assert all(len(cell.rstrip("x").split(".")[1]) == 4 for cell in row[1:5])


def test_twelve_plans_fit_the_terminal(assigner, folder, equal, solved):
    """At 80 columns no line is longer, and every plan is one line of figures."""
    names = [f"plan-{n}.json" for n in range(12)]
    for n, name in enumerate(names):
        save_plan(solved if n % 3 else equal, folder / name)
    out = assigner("compare", *names, columns=80).stdout
    assert max(map(len, out.splitlines())) <= 80
    figures = out.split("\n\n")[0].splitlines()
    assert len(figures[: figures.index(next(line for line in figures if line.startswith("no room")))]) == 3 + 12


def with_profile(folder, plan, **change):
    """The plan as solved from profile.json."""
    digest = hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()
    return replace(plan, profile=ProfileReference("profile.json", digest), **change)


def test_an_edited_plan_is_compared_as_it_would_run(assigner, folder, equal, solved):
    """With a new step, a line that says so, and no gap: that was proven of another placement."""
    save_plan(with_profile(folder, solved), folder / "a.json")
    save_plan(with_profile(folder, solved, stages=equal.stages), folder / "moved.json")
    data = json.loads(assigner("compare", "a.json", "moved.json", "--json").stdout)
    assert data["plans"][1]["step_s"] == equal.predicted.step_s
    assert [each["gap"] for each in data["plans"]] == [0.018, None]
    (note,) = data["notes"]
    assert note.startswith("moved.json: priced anew with the profile it was solved from")
    assert note in " ".join(assigner("compare", "a.json", "moved.json").stdout.split())


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_plan_without_a_prediction_among_others(assigner, folder, profile, equal, solved, at_hand):
    """Priced where its profile is at hand; else dashes, with measured runs and as baseline too."""
    bare = with_profile(folder, solved, predicted=None) if at_hand else replace(solved, predicted=None)
    save_plan(bare, folder / "bare.json")
    save_trace(run_in(profile, solved), folder / "trace.json")
    line = ("compare", "bare.json", "equal.json", "--measured", "trace.json")
    data = json.loads(assigner(*line, "--json").stdout)
    assert data["plans"][0]["step_s"] == (solved.predicted.step_s if at_hand else None)
    assert (data["plans"][0]["measured"]["error"] is not None) is at_hand
    assert ("has no prediction" if at_hand else "bare.json is not priced") in data["notes"][0]
    for more in ((), ("--md",)):
        assert assigner(*line, *more).exit_code == 0


def test_prices_that_a_plan_was_solved_with(assigner, folder, equal, solved):
    """Where the profile has none, those of --price count, for the other plans too, and it is told whose they are."""
    paid = replace(solved.solver, options={"prices": {"worker:0": 2.0, "worker:1": 1.0}})
    save_plan(with_profile(folder, solved, solver=paid), folder / "paid.json")
    save_plan(with_profile(folder, equal), folder / "free.json")
    data = json.loads(assigner("compare", "free.json", "paid.json", "--json").stdout)
    for each, plan in zip(data["plans"], (equal, solved), strict=True):
        assert each["cost_per_1000_samples"] == pytest.approx(3 / 3600 * 1000 / 8 * plan.predicted.step_s)
    assert data["notes"] == ["free.json: its workers cost what paid.json was solved with"]


def test_runs_of_other_remat_are_not_put_together(assigner, folder, profile, equal, solved):
    """Each kind has its row, and only the one that did what the plan says has an error of the prediction."""
    save_trace(run_in(profile, solved), folder / "own.json")
    save_trace(replace(run_in(profile, solved), remat="always"), folder / "always.json")
    out = assigner("compare", "equal.json", "solved.json", "--measured", "own.json", "--measured", "always.json").stdout
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.startswith("solved.json")}
    assert rows["solved.json (remat always)"][-2:] == ["-", "-"]
    assert "its steps stand apart" in out
