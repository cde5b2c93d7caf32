import json

import pytest


def test_profile_has_workers_partitions_and_links(assigner):
    """A profile's screen names every worker, the partitions as a range, and both link tables."""
    out = assigner("show", "profile.json").stdout
    for text in (
        "2 workers",
        "worker:0/cpu",
        "kind1",
        "6 partitions",
        "p0",
        "together",
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


def test_plan_has_stages_totals_and_proof(assigner):
    """A plan's screen has its stages, the step time, how good it is, and the baselines."""
    out = assigner("show", "solved.json").stdout
    for text in ("p0-4 (5)", "worker:1/cpu", "bubble", "samples/s", "within 1.8 % of the best possible", "equal split"):
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
    """At 80 columns no line is longer, the columns that matter are there, and no number is cut."""
    out = assigner("show", "solved.json", columns=80).stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "compute ms" in out
    assert "in flight" not in out
    assert "…" not in out


def test_wide_terminal_has_all_columns(assigner):
    """At 120 columns nothing is left out."""
    out = assigner("show", "solved.json", columns=120).stdout
    assert max(map(len, out.splitlines())) <= 120
    assert all(header in out for header in ("in flight", "transfer ms", "peak MiB", "of MiB", "memory"))


def test_pipe_is_as_wide_as_needed(assigner):
    """Without a terminal nothing wraps: one line per stage."""
    out = assigner("show", "solved.json").stdout
    assert sum("worker:" in line for line in out.splitlines()) == 2


def test_unpriced_plan_says_what_to_do(assigner, folder, solved):
    """A hand-written plan without a prediction is shown, with the command that predicts it."""
    document = json.loads((folder / "solved.json").read_text())
    for name in ("predicted", "solver", "baselines"):
        document.pop(name)
    (folder / "hand.json").write_text(json.dumps(document))
    result = assigner("show", "hand.json")
    assert result.exit_code == 0
    assert "assigner simulate" in result.stdout
