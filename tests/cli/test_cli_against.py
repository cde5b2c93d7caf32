import json
from dataclasses import replace

import pytest
from made_runs import run_in, slower_worker
from trace_event_rules import read_trace_events

from assigner.formats.plan import save_plan
from assigner.formats.profile import load_profile
from assigner.formats.trace import load_trace, save_trace


@pytest.fixture
def trace(folder, profile, solved):
    """trace.json: a run of solved.json in which worker 1 took 20 % longer than profiled."""
    save_trace(run_in(slower_worker(profile, 1, forward=1.2, backward=1.2), solved), folder / "trace.json")


def simulate(assigner, *arguments, plan="solved.json", **more):
    return assigner("simulate", plan, "--profile", "profile.json", *arguments, **more)


def test_against_prints_both_sides_and_the_cause(assigner, trace):
    """Step, difference, stages, messages, workers: on 80 columns as on a pipe."""
    for columns in (None, 80):
        result = simulate(assigner, "--against", "trace.json", columns=columns)
        assert result.exit_code == 0, result.stderr
        for text in ("predicted", "where the difference comes from", "largest cause: worker:1/cpu's", "stages", "peak"):
            assert text in result.stdout
        if columns:
            assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_one_object(assigner, trace):
    """--json has the step both ways, and nothing else is printed."""
    data = json.loads(simulate(assigner, "--against", "trace.json", "--json").stdout)
    assert data["kind"] == "agreement"
    assert data["step"]["measured_s"] > data["step"]["predicted_s"]
    drawn = data["timeline"]
    assert [step["number"] for step in drawn["measured"]["steps"]] == [1]
    assert len(drawn["predicted"]["actions"]) == len(drawn["measured"]["actions"])


def test_calibrate_writes_a_profile_that_predicts_what_was_measured(assigner, folder, trace):
    """The corrected profile prices the plan at the measured step time, and says that it is corrected."""
    result = simulate(assigner, "--against", "trace.json", "--calibrate", "new.json", "--json")
    assert result.exit_code == 0, result.stderr
    assert "wrote new.json: it predicts" in result.stderr
    measured = json.loads(result.stdout)["step"]["measured_s"]
    again = json.loads(assigner("simulate", "solved.json", "--profile", "new.json", "--json").stdout)
    assert again["predicted"]["step_s"] == pytest.approx(measured)
    assert "calibrated by trace.json" in load_profile(folder / "new.json").warnings[0]


def test_an_existing_profile_is_replaced_with_force_only(assigner, folder, trace):
    """Exit code 2 and a hint; the file stays as it is."""
    before = (folder / "profile.json").read_text()
    result = simulate(assigner, "--against", "trace.json", "--calibrate", "profile.json")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (folder / "profile.json").read_text() == before
    assert simulate(assigner, "--against", "trace.json", "--calibrate", "profile.json", "--force").exit_code == 0
    assert (folder / "profile.json").read_text() != before


@pytest.mark.parametrize("flag", ["--calibrate", "--trace"])
def test_the_run_is_not_overwritten(assigner, folder, trace, flag):
    """The file that is learned from is kept, by force or not."""
    before = (folder / "trace.json").read_text()
    result = simulate(assigner, "--against", "trace.json", flag, "trace.json", "--force")
    assert result.exit_code == 2
    assert "reads" in result.stderr
    assert (folder / "trace.json").read_text() == before


@pytest.mark.parametrize(("step", "count", "name"), [("median", 1, "step 1"), ("2", 1, "step 2"), ("all", 3, "step 0")])
def test_predicted_and_measured_in_one_file(assigner, folder, trace, step, count, name):
    """One step or all of them, each with as many predicted ones, and both timelines on the screen."""
    result = simulate(assigner, "--against", "trace.json", "--step", step, "--trace", "both.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("measured  ") >= 2
    seen = read_trace_events((folder / "both.json").read_text())
    assert seen.order[1:3] == ["worker:0/cpu predicted", "worker:0/cpu measured"]
    for side in ("predicted", "measured"):
        assert len(seen.slices["steps", side]) == count
    assert seen.slices["steps", "measured"][0]["name"].startswith(name)
    assert seen.other["trace"] == "trace.json"


@pytest.mark.parametrize(("step", "words"), [("3", "steps 0 to 2"), ("-1", "median"), ("last", "median")])
def test_a_step_that_is_not_there(assigner, trace, step, words):
    """Exit code 2, with what there is."""
    result = simulate(assigner, "--against", "trace.json", f"--step={step}")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("flags", [("--calibrate", "new.json"), ("--against", "trace.json", "--memory")])
def test_flags_that_do_not_go_together(assigner, trace, flags):
    """A calibration needs a trace; memory over time is of a prediction."""
    result = simulate(assigner, *flags)
    assert result.exit_code == 2
    assert "hint:" in result.stderr


def test_a_trace_of_another_plan(assigner, trace):
    """Exit code 5, with the next step."""
    result = simulate(assigner, "--against", "trace.json", plan="equal.json")
    assert result.exit_code == 5
    assert "another plan" in result.stderr


def test_a_file_that_is_no_trace(assigner, trace):
    """Exit code 5 too."""
    assert simulate(assigner, "--against", "profile.json").exit_code == 5
    assert simulate(assigner, "--against", "nowhere.json").exit_code == 2


def test_memory_over_time(assigner, folder, solved):
    """--memory says when a worker holds the most; with --json every moment, none above the predicted peak."""
    assert "memory over time" in simulate(assigner, "--memory").stdout
    data = json.loads(simulate(assigner, "--memory", "--json").stdout)
    peaks = [each["peak_bytes"] for each in data["predicted"]["workers"]]
    for each, peak in zip(data["memory_over_time"], peaks, strict=True):
        assert each["peak_bytes"] <= peak
        assert len(each["moments"]) > 2
        assert list(each["moments"][0]) == ["at_s", "activations", "workspace", "messages"]
    assert "memory_over_time" not in json.loads(simulate(assigner, "--json").stdout)
    save_plan(replace(solved, predicted=None), folder / "hand.json")
    assert simulate(assigner, "--memory", plan="hand.json").exit_code == 0


def test_a_starved_run_corrects_no_profile(assigner, folder, trace):
    """Exit code 6 and nothing is written; --force-busy takes it, and without --calibrate it is a warning."""
    made = load_trace(folder / "trace.json")
    starved = replace(made, workers=tuple(replace(each, starved=0.8) for each in made.workers))
    save_trace(starved, folder / "trace.json", force=True)
    result = simulate(assigner, "--against", "trace.json", "--calibrate", "new.json")
    assert result.exit_code == 6
    assert "had 80 % of the processor time of worker:0/cpu" in result.stderr
    assert not (folder / "new.json").exists()
    assert "warning: the run was on a busy machine" in simulate(assigner, "--against", "trace.json").stdout
    assert simulate(assigner, "--against", "trace.json", "--calibrate", "new.json", "--force-busy").exit_code == 0
