from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.plan import Baseline, SolverReport
from assigner.report.plan import (
    best_baseline,
    describe_solver,
    fullness,
    gain,
    plan_data,
    remat_text,
    speed_up,
    stages,
    status,
)
from assigner.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


@pytest.fixture
def plan():
    return priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (0, ["p3"])]), PROFILE)


def report(gap, kind="optimal"):
    return SolverReport("HiGHS", "1.0", kind, 1.0, 1 - gap, gap, 0.5)


@pytest.mark.parametrize(
    ("gap", "text"),
    [(0.0, "optimal"), (1e-4, "optimal"), (0.018, "within 1.8 % of the best possible"), (1.0, "nothing proven")],
)
def test_status_says_what_is_proven(gap, text):
    """A gap that is none is called optimal, another is told, and no bound is no proof."""
    assert text in status(report(gap))


def test_stop_by_a_limit_is_said():
    """A search that the time limit or the user stopped says so beside its status; one that ended by itself does not."""
    ended = report(0.1, "feasible")
    late = replace(ended, options={"time_limit": ended.seconds})
    assert "stopped by the time limit" in describe_solver(late)
    assert "interrupted" in describe_solver(replace(ended, options={"proven_by": ["interrupted"]}))
    assert "stopped" not in describe_solver(replace(ended, options={"time_limit": 10 * ended.seconds}))
    assert "stopped" not in describe_solver(report(0.1))


def test_worker_with_two_stages_is_counted_once(plan):
    """A worker's times stand at its first stage; its second stage leaves them out."""
    rows = stages(plan).rows
    assert [row[1] for row in rows] == ["worker:0/cpu", "worker:1/cpu", "worker:0/cpu"]
    assert rows[0][5]
    assert rows[2][5:] == ("",) * 6


def test_speed_up_is_over_the_best_baseline_that_fits(plan):
    """Baselines that do not fit play no part, and the best of the others is the measure."""
    step = plan.predicted.step_s
    rated = replace(plan, baselines=(Baseline("a", None), Baseline("b", 3 * step), Baseline("c", 2 * step)))
    assert best_baseline(rated) == ("c", 2 * step)
    assert speed_up(rated) == pytest.approx(2)
    assert gain(rated).text == "2.00x as fast as the best baseline (c)"
    assert "none of the baselines fits" in gain(replace(plan, baselines=(Baseline("a", None),))).text
    assert gain(replace(plan, baselines=(Baseline("c", step),))).text.startswith("as fast as")


def test_remat_text():
    """None is a dash, every partition is `all`, else their names."""
    names = ["b.0", "b.1", "b.2", "b.3"]
    assert remat_text(names, []) == "-"
    assert remat_text(names, names) == "all"
    assert remat_text(names, ["b.3", "b.1", "b.2"]) == "b.1-3 (3)"


def test_overfull_memory_is_visible(plan):
    """A peak above the capacity is a share above 1, and its bar ends in an exclamation mark."""
    worker = replace(plan.predicted.workers[0], peak_bytes=3e9, capacity_bytes=2e9)
    assert fullness(worker) == 1.5
    over = replace(plan, predicted=replace(plan.predicted, workers=(worker, *plan.predicted.workers[1:])))
    assert stages(over).rows[0][-1] == "███████! 150 %"


def test_unpriced_plan_has_rows_without_times(plan):
    """Without a prediction every stage is still listed."""
    rows = stages(replace(plan, predicted=None)).rows
    assert len(rows) == 3
    assert rows[0][5:] == ("",) * 6
    assert plan_data(replace(plan, predicted=None))["derived"]["speed_up"] is None
