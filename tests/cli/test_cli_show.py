import hashlib
import json
from dataclasses import replace

import pytest
from builders import make_profile

from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile
from assigner.formats.profilewarnings import with_warnings


def test_profile_has_workers_partitions_and_links(assigner):
    """A profile's screen names every worker, the partitions as a range, and both link tables."""
    out = assigner("show", "profile.json").stdout
    for text in (
        "2 workers",
        "worker:0/cpu",
        "kind1",
        "6 partitions",
        "p0",
        "one of them",
        "MB/s in messages of",
        "latency",
    ):
        assert text in out


def test_profile_shows_times_per_worker(assigner):
    """Times are those of the largest measured micro-batch: 2 ms a sample, 4 samples, and 3 times that."""
    lines = [line.split() for line in assigner("show", "profile.json").stdout.splitlines()]
    first = next(line for line in lines if line and line[0] == "p0")
    assert first[2:7] == ["worker:0/cpu", "4", "8.00", "16.0", "1.0"]
    assert ["worker:1/cpu", "4", "24.0", "48.0", "1.0"] in [line[:5] for line in lines]


def test_a_file_that_cannot_be_read_is_told_with_a_profile_beside_it_too(assigner, folder):
    """Nobody knows yet whether it is a profile itself."""
    (folder / "half.json").write_text((folder / "solved.json").read_text()[:-40])
    for more in ([], ["--profile", "profile.json"]):
        result = assigner("show", "half.json", *more)
        assert result.exit_code == 5
        assert "half.json: not JSON" in result.stderr


def test_plan_has_stages_totals_and_proof(assigner):
    """A plan's screen has its stages, the step time, how good it is, and the baselines."""
    out = assigner("show", "solved.json").stdout
    for text in (
        "p0-4 (5)",
        "worker:1/cpu",
        "bubble",
        "samples/s",
        "optimal to 1.8 % with one stage a worker",
        "equal split",
    ):
        assert text in out
    assert "not possible" in out


def test_json_carries_the_numbers(assigner, solved):
    """--json of a plan is the plan with what is derived from it, unrounded."""
    data = json.loads(assigner("show", "solved.json", "--json").stdout)
    assert data["predicted"]["step_s"] == solved.predicted.step_s
    assert data["derived"]["speed_up"] == pytest.approx(solved.baselines[0].step_s / solved.predicted.step_s)
    assert data["stages"][0]["rematerialise"] == ["p4"]


def test_json_of_a_profile(assigner):
    """--json of a profile has seconds and bytes of every group and link."""
    data = json.loads(assigner("show", "profile.json", "--json").stdout)
    assert [worker["name"] for worker in data["workers"]] == ["worker:0/cpu", "worker:1/cpu"]
    assert data["partitions"][0]["timings"][1]["forward_s"] == pytest.approx(0.024)
    assert 1e5 / 2e-4 < data["links"][0]["bytes_per_s"] < 1e9
    assert data["links"][0]["latency_s"] == pytest.approx(1e-4 + 1e-6)


def test_narrow_terminal_leaves_out_columns(assigner):
    """At 80 columns no line is longer, the columns that matter are there, others are named, and no number is cut."""
    out = assigner("show", "solved.json", columns=80).stdout
    assert max(map(len, out.splitlines())) <= 80
    header = next(line for line in out.splitlines() if "compute ms" in line)
    assert "in flight" in header
    assert "transfer ms" not in header
    assert "no room at 80 columns for: transfer ms, " in out
    assert "…" not in out


def test_wide_terminal_has_all_columns(assigner):
    """At 120 columns nothing is left out."""
    out = assigner("show", "solved.json", columns=120).stdout
    assert max(map(len, out.splitlines())) <= 120
    assert all(header in out for header in ("in flight", "transfer ms", "idle ms", "peak MiB", "of MiB", "memory %"))


def test_pipe_is_as_wide_as_needed(assigner):
    """Without a terminal nothing wraps: one line per stage."""
    out = assigner("show", "solved.json").stdout
    rows = [line.split()[:2] for line in out.splitlines()[6:8]]
    assert rows == [["0", "worker:0/cpu"], ["1", "worker:1/cpu"]]


def test_unpriced_plan_says_what_to_do(assigner, folder, solved):
    """A hand-written plan without a prediction is shown, with the command that predicts it."""
    document = json.loads((folder / "solved.json").read_text())
    for name in ("predicted", "solver", "baselines"):
        document.pop(name)
    (folder / "hand.json").write_text(json.dumps(document))
    result = assigner("show", "hand.json")
    assert result.exit_code == 0
    assert "assigner simulate" in result.stdout


def test_plan_has_a_clock_memory_and_the_bottleneck(assigner):
    """Which micro-batch is where, what fills the memory, and what limits the plan, within the width."""
    out = assigner("show", "solved.json", columns=80).stdout
    assert max(map(len, out.splitlines())) <= 80
    for text in ("0 worker:0/cpu  F0 F1 F2 F3", "P parameters, G gradients", "limits the plan", "--what-if"):
        assert text in out


def test_a_usual_plan_is_a_screen(assigner):
    """About fifty lines, and with -v no fewer."""
    short, whole = (assigner("show", "solved.json", *flag, columns=80).stdout for flag in ((), ("-v",)))
    assert len(short.splitlines()) <= 50
    assert len(whole.splitlines()) >= len(short.splitlines())


def test_the_profile_of_a_plan_is_used_where_it_is_at_hand(assigner, folder, solved):
    """Named it has to be there and to fit; the one that the plan names is found by itself, and may be gone."""
    exact = json.loads(assigner("show", "solved.json", "--profile", "profile.json", "--json").stdout)
    assert exact["derived"]["clock"]["exact"]
    assert exact["derived"]["memory_bytes"]["worker:0/cpu"]["reserve"] == 0
    assert not json.loads(assigner("show", "solved.json", "--json").stdout)["derived"]["clock"]["exact"]
    digest = hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()
    save_plan(replace(solved, profile=ProfileReference("profile.json", digest)), folder / "known.json")
    assert json.loads(assigner("show", "known.json", "--json").stdout)["derived"]["clock"]["exact"]
    (folder / "profile.json").unlink()
    assert assigner("show", "known.json").exit_code == 0
    assert assigner("show", "known.json", "--profile", "profile.json").exit_code == 2


def test_a_profile_takes_no_profile(assigner):
    """--profile is for plans."""
    result = assigner("show", "profile.json", "--profile", "profile.json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_spreads_are_summed_up(assigner, folder, profile):
    """Many wide figures are a few lines that say what matters; -v lists each."""
    points = tuple(replace(each, spread=0.3) for each in profile.measurements)
    save_profile(with_warnings(replace(profile, measurements=points)), folder / "loud.json")
    short, whole = (assigner("show", "loud.json", *flag).stdout for flag in ((), ("-v",)))
    assert short.count("warning:") == 1
    assert "12 of 12 timings" in short
    assert whole.count("warning:") == 12


@pytest.mark.parametrize("columns", [80, 120])
def test_a_large_profile_fits_the_terminal(assigner, folder, columns):
    """Sixteen workers: every line fits, whole matrices where there is room, groups where there is none."""
    wide = make_profile(work=[1e-3] * 3, slowness=[1.0] * 16)
    workers = tuple(replace(each, kind="GPU", host=f"node{each.rank // 8}") for each in wide.workers)
    save_profile(replace(wide, workers=workers), folder / "wide.json")
    out = assigner("show", "wide.json", columns=columns).stdout
    assert max(map(len, out.splitlines())) <= columns
    assert ("from a rank" in out) == (columns == 120)
    assert ("1 node1, GPU (x8)" in out) == (columns == 80)


def edited(folder, profile, plan):
    """The plan with its profile's hash, saved, and again with one partition moved, as in an editor."""
    digest = hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()
    save_plan(replace(plan, profile=ProfileReference("profile.json", digest)), folder / "plan.json")
    document = json.loads((folder / "plan.json").read_text())
    first, second = document["stages"]
    first["rematerialise"] = []
    second["partitions"].insert(0, first["partitions"].pop())
    (folder / "moved.json").write_text(json.dumps(document))
    return document


def test_an_edited_plan_is_shown_as_it_would_run(assigner, folder, profile, solved):
    """Priced anew with the profile at hand, which a line says; what was proven of the other placement is gone."""
    edited(folder, profile, solved)
    assert "priced anew" not in assigner("show", "plan.json").stdout
    data = json.loads(assigner("show", "moved.json", "--json").stdout)
    told = json.loads(assigner("simulate", "moved.json", "--json").stdout)
    assert data["predicted"]["step_s"] == told["predicted"]["step_s"] != solved.predicted.step_s
    assert data["solver"] is None
    out = assigner("show", "moved.json").stdout
    assert data["derived"]["notes"][0] in out
    assert "priced anew with the profile it was solved from" in out
    assert "status:" not in out


def test_a_plan_with_a_strange_worker_has_no_figures(assigner, folder, profile, solved):
    """What does not fit its profile says why, and shows no prediction of other workers."""
    document = edited(folder, profile, solved)
    document["stages"][1]["worker"] = "worker:7/cuda:3"
    (folder / "strange.json").write_text(json.dumps(document))
    out = assigner("show", "strange.json").stdout
    assert "does not fit profile.json, which it was solved from: stages[1]: the plan names 'worker:7/cuda:3'" in out
    assert "predicted:" not in out
    assert "worker:1/cpu, the plan's stages do not" in out


def test_a_changed_profile_is_told(assigner, folder, profile, solved):
    """The plan's own figures are shown, with a line that they were not checked."""
    edited(folder, profile, solved)
    save_profile(make_profile(work=[3e-3] * 6, slowness=[1.0, 3.0]), folder / "profile.json", force=True)
    out = assigner("show", "plan.json").stdout
    assert "not checked with its profile: profile.json has changed since" in out
    assert "predicted: " in out


def test_a_name_that_steers_the_terminal_is_refused(assigner, folder, profile, solved):
    """Exit code 5, and the name escaped with its place."""
    document = edited(folder, profile, solved)
    document["stages"][0]["partitions"][0] = "p0\x1b[2J"
    (folder / "bad.json").write_text(json.dumps(document))
    result = assigner("show", "bad.json")
    assert (result.exit_code, result.stdout) == (5, "")
    assert r'bad.json: stages[0].partitions[0]: "p0\u001b[2J" is not allowed' in result.stderr


@pytest.mark.filterwarnings("always::assigner.formats.document.UnknownFieldWarning")
def test_a_misspelt_field_is_told_beside_the_result(assigner, folder):
    """In one line, with the name that is meant; what is asked for as JSON is JSON."""
    document = json.loads((folder / "solved.json").read_text())
    document["stages"][0]["rematerialize"] = document["stages"][0].pop("rematerialise")
    (folder / "solved.json").write_text(json.dumps(document))
    for command in (["show"], ["simulate", "--profile", "profile.json"]):
        result = assigner(*command, "solved.json", "--json")
        assert json.loads(result.stdout)
        told = [line for line in result.stderr.splitlines() if "rematerialize" in line]
        said = "stages[0].rematerialize is no field of a plan, and is left out (did you mean rematerialise?)"
        assert told == [f"warning: solved.json: {said}"]
    assert "rematerialize" not in assigner("-q", "show", "solved.json").stderr
