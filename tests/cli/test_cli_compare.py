import json
from dataclasses import replace

import pytest

from assigner.plan import save_plan


def test_baseline_and_speed_up(assigner, equal, solved):
    """The first plan is marked as the baseline, and the second has its speed-up over it."""
    out = assigner("compare", "equal.json", "solved.json").stdout
    factor = equal.predicted.step_s / solved.predicted.step_s
    assert "equal.json (baseline)" in out
    assert f"{factor:.2f}x" in out


def test_only_changes_are_listed(assigner):
    """Below the table stands what moved, and nothing that stayed."""
    out = assigner("compare", "equal.json", "solved.json").stdout
    assert "2 of 6 partitions changed" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["p3", "worker:1/cpu", "->", "worker:0/cpu"] in rows
    assert ["p4", "worker:1/cpu", "->", "worker:0/cpu", "on"] in rows
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
    header = next(line for line in lines if line.startswith("| plan |"))
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
    assert "(baseline)" in out
    assert ("transfer %" in out) == (columns == 120)
