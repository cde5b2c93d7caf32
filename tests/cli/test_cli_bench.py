"""`assigner bench`: plans take turns, and what they took stands beside what was predicted."""

import json
from pathlib import Path

import pytest
from made_runs import run_in, slower_worker

from assigner.formats.plan import load_plan, save_plan
from assigner.formats.trace import load_trace, save_trace
from assigner.launch import ranks as launch


@pytest.fixture
def runs(folder, profile, monkeypatch):
    """The plans that were started, in order; their runs take what they would with a slower second worker."""
    started = []

    def run(program, layout, environment):
        plan, trace = (Path(word) for word in program[4:6])
        started.append((plan.name, layout.ranks, environment["OMP_NUM_THREADS"], program[6:]))
        truth = slower_worker(profile, 1, forward=1.2, backward=1.2)
        save_trace(run_in(truth, load_plan(plan), steps=int(program[7])), trace)

    monkeypatch.setattr(launch, "launch", run)
    return started


def test_plans_take_turns(assigner, runs):
    """Each round trains every plan once, with the same steps before those that count."""
    result = assigner("bench", "equal.json", "solved.json", "--steps", "4", "--rounds", "2", "--threads", "3")
    assert result.exit_code == 0, result.stderr
    assert [run[0] for run in runs] == ["equal.json", "solved.json"] * 2
    assert {run[1:3] for run in runs} == {(2, "3")}
    assert all(run[3] == ["--steps", "4", "--warm-up", "2"] for run in runs)
    assert result.stderr.splitlines()[-1] == "round 2 of 2: solved.json"


def test_the_table_has_predicted_and_measured(assigner, runs):
    """A row for each plan, of all of its rounds, as compare --measured has it of the same traces."""
    result = assigner("bench", "equal.json", "solved.json", "--steps", "6", "--traces", "kept")
    rows = [line.split()[:2] for line in result.stdout.splitlines() if line.startswith(("equal.json ", "solved.json "))]
    assert rows == [["equal.json", "12"], ["solved.json", "12"]]
    kept = sorted(str(path) for path in Path("kept").iterdir())
    assert len(kept) == 4
    flags = [word for path in kept for word in ("--measured", path)]
    compared = assigner("compare", "equal.json", "solved.json", *flags).stdout
    assert set(result.stdout.splitlines()) <= set(compared.splitlines())


def test_one_plan_alone_is_measured(assigner, runs):
    """It is its own baseline."""
    result = assigner("bench", "solved.json", "--json", "--rounds", "1")
    (plan,) = json.loads(result.stdout)["plans"]
    assert len(plan["measured"]["steps_s"]) == 20
    assert plan["measured"]["error"] < 0


def test_nothing_is_left_behind(assigner, runs, monkeypatch, tmp_path):
    """Without --traces the traces are gone when the table stands."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert assigner("bench", "solved.json").exit_code == 0
    assert not list((tmp_path / "temporary").iterdir())


def test_traces_are_not_written_over(assigner, runs):
    """A folder that has one of them is refused before anything is trained."""
    assert assigner("bench", "solved.json", "--traces", "kept").exit_code == 0
    before = load_trace(next(Path("kept").iterdir()))
    again = assigner("bench", "solved.json", "--traces", "kept")
    assert again.exit_code == 2
    assert "exists" in again.stderr
    assert len(runs) == 2
    assert load_trace(next(Path("kept").iterdir())) == before


def test_plans_of_several_workloads_are_refused(assigner, runs, equal):
    """As compare does, before anything is trained."""
    from dataclasses import replace

    other = replace(equal, workload=replace(equal.workload, fingerprint="sha256:other"))
    save_plan(other, Path("other.json"))
    result = assigner("bench", "equal.json", "other.json")
    assert result.exit_code == 5
    assert not runs
