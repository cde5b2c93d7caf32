"""What other plans do otherwise than the baseline."""

from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.report.placementchanges import changed_settings, placement_changes, placement_changes_data, same
from assigner.report.sheet import Line

PROFILE = make_profile(work=[1e-3] * 6, slowness=[1, 2])
HALVES = (0, ["p0", "p1", "p2"]), (1, ["p3", "p4", "p5"])
BASE = make_plan(PROFILE, HALVES)


def remat(plan, *names):
    stages = tuple(
        replace(stage, rematerialise=tuple(name for name in stage.partitions if name in names)) for stage in plan.stages
    )
    return replace(plan, stages=stages)


MOVED = remat(make_plan(PROFILE, [(0, ["p0", "p1", "p2", "p3", "p4"]), (1, ["p5"])]), "p4")
FLIPPED = make_plan(PROFILE, [(1, ["p0", "p1", "p2"]), (0, ["p3", "p4", "p5"])], micro_batches=2)


def test_neighbours_with_one_change_are_a_row():
    """Moved alone, moved and rematerialised, and what stays with --all."""
    (sheet,) = placement_changes([("base", BASE), ("other", MOVED)])
    assert sheet.title == "other against base: 2 of 6 partitions changed"
    assert sheet.rows == (
        ("p3", "worker:1/cpu", "-> worker:0/cpu", ""), ("p4", "worker:1/cpu", "-> worker:0/cpu", "off -> on"),
    )  # fmt: skip
    (whole,) = placement_changes([("base", BASE), ("other", MOVED)], everything=True)
    assert [row[0] for row in whole.rows] == ["p0-2 (3)", "p3", "p4", "p5"]
    assert whole.rows[0][2] == "stays"


def test_settings_come_first_and_an_empty_column_is_left_out():
    """Split and order of ranks, then the ranges that moved."""
    (sheet,) = placement_changes([("base", BASE), ("other", FLIPPED)])
    assert [row[0] for row in sheet.rows] == ["micro-batches", "order of ranks", "p0-2 (3)", "p3-5 (3)"]
    assert sheet.rows[0][1:] == ("4 x 2", "-> 2 x 4")
    assert [column.header for column in sheet.columns] == ["", "from", "to"]


def test_remat_switched_off_is_told():
    """Where a partition stays and is stored again."""
    (sheet,) = placement_changes([("base", MOVED), ("other", remat(MOVED))])
    assert sheet.rows == (("p4", "worker:0/cpu", "stays", "on -> off"),)


def test_more_plans_share_a_table():
    """A row of counts per plan, and a column of ranks per plan, the same as the baseline's as a sign."""
    plans = [("base", BASE), ("moved", MOVED), ("flipped", FLIPPED), ("again", BASE)]
    summary, matrix = placement_changes(plans)
    assert summary.rows == (
        ("2", "moved", "2 of 6", "1 on", "-"),
        ("3", "flipped", "6 of 6", "-", "micro-batches 2 x 4; order of ranks 1, 0"),
        ("4", "again", "0 of 6", "-", "-"),
    )
    assert [column.header for column in matrix.columns] == ["partitions", "#1", "#2", "#3", "#4"]
    assert matrix.rows == (
        ("p0-2 (3)", "0", "=", "1", "="), ("p3", "1", "0", "0", "="), ("p4", "1", "0R", "0", "="),
        ("p5", "1", "=", "0", "="),
    )  # fmt: skip


def test_plans_of_one_placement_have_no_matrix():
    """Where no partition is elsewhere a sentence says so; --all lists them."""
    plans = [("base", BASE), *((f"m{n}", make_plan(PROFILE, HALVES, micro_batches=n)) for n in (1, 2, 8))]
    assert isinstance(placement_changes(plans)[1], Line)
    assert len(placement_changes(plans, everything=True)[1].rows) == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schedule": "interleaved"}, "schedule"),
        ({"micro_batches": 2, "micro_batch_size": 4}, "micro-batches"),
        ({"workload": replace(PROFILE.workload, batch_size=7)}, "batch, micro-batches"),
    ],
)
def test_every_setting_makes_another_plan(change, what):
    """Each is named and makes the plans differ."""
    other = replace(BASE, **change)
    assert not same(BASE, other)
    assert ", ".join(changed_settings(BASE, other)) == what
    assert ", ".join(placement_changes_data(BASE, other)["settings_changed"]) == what


def test_depths_are_those_that_run():
    """1F1B's own depths and the same ones written out are one plan; others are another."""
    default = replace(BASE, schedule="1f1b")
    written, deeper = (
        replace(
            default,
            stages=tuple(replace(stage, in_flight=depth) for stage, depth in zip(BASE.stages, depths, strict=True)),
        )
        for depths in ((2, 1), (2, 2))
    )
    assert same(default, written)
    assert changed_settings(default, deeper) == {"in flight": ("2, 1", "2, 2")}
    assert changed_settings(BASE, default)["in flight"] == ("all", "2, 1")


def test_two_devices_of_one_rank_have_names():
    """Where the rank does not tell the worker its name stands in the table."""
    gpu = replace(BASE, stages=(replace(BASE.stages[0], sole_worker="worker:0/cuda:0"), BASE.stages[1]))
    _, matrix = placement_changes([("base", BASE), ("gpu", gpu), ("b", BASE), ("c", BASE)])
    assert matrix.rows[0][1:3] == ("worker:0/cpu", "worker:0/cuda:0")
