"""`assigner schedule`: orders shown, checked, written out and put in the place of others."""

import json

import pytest

from assigner.formats.plan import load_plan

ORDERS = {"worker:0/cpu": "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "worker:1/cpu": "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"}
KNOWN = ("--profile", "profile.json")


@pytest.fixture
def mine(folder):
    (folder / "mine.json").write_text(json.dumps(ORDERS))
    return "mine.json"


def test_the_order_of_any_plan_is_shown(assigner, folder):
    result = assigner("schedule", "solved.json", *KNOWN)
    assert result.exit_code == 0
    assert "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0" in result.stdout
    assert "clock" in result.stdout
    assert "timeline of a step" in result.stdout
    assert "fits" in result.stdout


def test_an_order_by_hand_that_can_run_becomes_a_plan(assigner, folder, mine):
    result = assigner("schedule", "solved.json", *KNOWN, "--orders", mine, "-o", "new.json")
    assert result.exit_code == 0
    plan = load_plan(folder / "new.json")
    assert (plan.schedule, plan.orders, plan.format_version, plan.solver) == ("listed", ORDERS, "2.0", None)
    assert plan.predicted is not None
    held = json.loads(assigner("schedule", "new.json", *KNOWN, "--json").stdout)
    assert held["orders"] == ORDERS
    assert held["in_flight"] == {"worker:0/cpu": {"0": 2}, "worker:1/cpu": {"1": 1}}
    assert held["predicted"]["step_s"] == plan.predicted.step_s


def test_an_order_that_is_not_sound_is_refused_with_the_reason(assigner, folder):
    (folder / "bad.json").write_text(json.dumps(ORDERS | {"worker:1/cpu": "1F0 1B0 1F1 1B1 1F2 1B2 1F3"}))
    result = assigner("schedule", "solved.json", *KNOWN, "--orders", "bad.json", "-o", "new.json")
    assert result.exit_code == 5
    assert "bad.json: orders[worker:1/cpu]: 1B3 is missing" in result.stderr
    assert not (folder / "new.json").exists()


def test_a_circle_is_refused_with_who_waits_for_whom(assigner, folder):
    circle = {"worker:0/cpu": "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", "worker:1/cpu": "1F0 1F1 1B1 1B0 1F2 1B2 1F3 1B3"}
    (folder / "bad.json").write_text(json.dumps(circle))
    result = assigner("schedule", "solved.json", *KNOWN, "--orders", "bad.json")
    assert result.exit_code == 5
    assert "worker:0/cpu waits at 0B0 for 1B0 of worker:1/cpu" in result.stderr
    assert "worker:1/cpu waits at 1F1 for 0F1 of worker:0/cpu" in result.stderr


def test_a_plan_written_out_is_the_same_plan(assigner, folder, solved):
    assert assigner("schedule", "solved.json", *KNOWN, "--list", "-o", "listed.json").exit_code == 0
    plan = load_plan(folder / "listed.json")
    assert plan.predicted == solved.predicted
    for command in (
        "show listed.json",
        "simulate listed.json --profile profile.json",
        "compare solved.json listed.json",
    ):
        result = assigner(*command.split())
        assert result.exit_code == 0
        assert "listed" in result.stdout


def test_the_csv_of_torch_is_read_and_written(assigner, folder, mine):
    assert assigner("schedule", "solved.json", *KNOWN, "--orders", mine, "-o", "new.json").exit_code == 0
    assert assigner("export", "new.json", *KNOWN, "--to", "pipelining-schedule", "-o", "torch.csv").exit_code == 0
    text = (folder / "torch.csv").read_text()
    assert text.splitlines()[1] == ORDERS["worker:1/cpu"].replace(" ", ",")
    (folder / "torch.csv").write_text(text.replace("1B0,", "1B0,,"))
    assert assigner("schedule", "solved.json", *KNOWN, "--orders", "torch.csv", "-o", "again.json").exit_code == 0
    assert load_plan(folder / "again.json").orders == ORDERS
    (folder / "torch.csv").write_text(text.splitlines()[0])
    result = assigner("schedule", "solved.json", *KNOWN, "--orders", "torch.csv")
    assert result.exit_code == 5
    assert "1 row, and 2 workers" in result.stderr


def test_files_with_orders_that_are_none_are_refused(assigner, folder):
    for text, said in (("{", "not JSON"), ('{"worker:0/cpu": 3}', "orders[worker:0/cpu]: 3 is not allowed")):
        (folder / "bad.json").write_text(text)
        result = assigner("schedule", "solved.json", *KNOWN, "--orders", "bad.json")
        assert result.exit_code == 5
        assert said in result.stderr


def test_flags_that_do_not_go_together(assigner, folder, mine):
    assert assigner("schedule", "solved.json", "--orders", mine, "--list").exit_code == 2
    assert assigner("schedule", "solved.json", "-o", "new.json").exit_code == 2


def test_a_broken_order_in_a_plan_file_is_told_by_every_command(assigner, folder, mine):
    assigner("schedule", "solved.json", *KNOWN, "--orders", mine, "-o", "new.json")
    document = json.loads((folder / "new.json").read_text())
    document["orders"]["worker:1/cpu"] += " 1B9"
    (folder / "new.json").write_text(json.dumps(document))
    for command in ("show new.json", "simulate new.json", "schedule new.json", "report new.json -o page.html"):
        result = assigner(*command.split())
        assert result.exit_code == 5
        assert "new.json: orders[worker:1/cpu]: 1B9 is not allowed" in result.stderr
