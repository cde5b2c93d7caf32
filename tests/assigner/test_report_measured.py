"""Traces beside the plans that they ran."""

from dataclasses import replace

import pytest
from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.errors import FormatError
from assigner.report.measured import Measured, assigned, measured, measured_data, speed_up
from assigner.simulate import priced

PROFILE = make_profile(work=[2e-3] * 4, slowness=[1, 3])


def plan(*stages, micro_batches=4):
    return priced(make_plan(PROFILE, stages, micro_batches=micro_batches), PROFILE)


EQUAL = plan((0, ["p0", "p1"]), (1, ["p2", "p3"]))
BETTER = plan((0, ["p0", "p1", "p2"]), (1, ["p3"]))
PLANS = [("equal", EQUAL), ("better", BETTER)]


def trace(of, *, slower=1.0, steps=3):
    return run_in(slower_worker(PROFILE, 1, forward=slower, backward=slower), of, steps=steps)


def lines(found):
    return [part.text for part in measured(PLANS, found)[1:]]


def test_a_trace_finds_its_plan():
    """Each trace goes to the plan that it ran, several of one plan are put together."""
    found = assigned(PLANS, [("a", trace(BETTER)), ("b", trace(EQUAL)), ("c", trace(BETTER, slower=1.1))])
    assert found["better"].traces == ("a", "c")
    assert found["equal"].traces == ("b",)
    assert len(found["better"].steps_s) == 6
    assert found["equal"].median_s == pytest.approx(EQUAL.predicted.step_s, rel=0.01)


def test_a_trace_of_none_of_the_plans_is_refused():
    """The error names the file, the nearest plan, and what differs from it."""
    other = plan((0, ["p0", "p1"]), (1, ["p2", "p3"]), micro_batches=2)
    with pytest.raises(
        FormatError, match=r"x\.json .* none of these plans: from equal.* micro-batches, micro-batch-size"
    ):
        assigned(PLANS, [("x.json", trace(other))])


def test_one_plan_under_two_names_gets_its_trace_twice():
    """Both names have it."""
    found = assigned([("one", EQUAL), ("two", EQUAL)], [("a", trace(EQUAL))])
    assert found["one"] == found["two"]


def test_speed_up_with_its_margin():
    """By hand: medians 4 and 2, notches of 1.57 x 1 / sqrt(9) / 4 and none."""
    base = Measured((3.0,) * 2 + (3.5,) + (4.0,) * 3 + (4.5,) + (5.0,) * 2, ("a",), ("plan",))
    mine = Measured((2.0,) * 4, ("b",), ("plan",))
    assert (base.median_s, base.iqr_s) == (4.0, 1.0)
    gain = speed_up(EQUAL, mine, EQUAL, base)
    assert gain.factor == 2.0
    assert gain.margin == pytest.approx(2 * 1.57 / 3 / 4)
    assert gain.clear
    near = speed_up(EQUAL, replace(mine, steps_s=(3.9,) * 4), EQUAL, base)
    assert near.clear is False


def test_one_step_has_no_margin():
    """A single step gives a factor without a ±."""
    one = Measured((2.0,), ("a",), ("plan",))
    assert one.margin is None
    assert speed_up(EQUAL, one, EQUAL, one).clear is None
    sheet = measured(PLANS, {"equal": one, "better": one})[0]
    assert sheet.rows[1][4] == "1.00x"


def test_batches_of_other_sizes_compare_by_samples():
    """Twice the batch in the same time is twice as fast."""
    double = replace(EQUAL, workload=replace(EQUAL.workload, batch_size=16), micro_batch_size=4)
    same = Measured((2.0, 2.0), ("a",), ("plan",))
    assert speed_up(double, same, EQUAL, same).factor == 2.0


def test_table_and_verdict():
    """Median, IQR, speed-up over the baseline and the prediction's error; the order is told."""
    found = assigned(PLANS, [("a", trace(EQUAL)), ("b", trace(BETTER, slower=1.2))])
    sheet, verdict = measured(PLANS, found)
    assert [row[0] for row in sheet.rows] == ["equal", "better"]
    assert sheet.rows[0][4] == "baseline"
    factor = found["equal"].median_s / found["better"].median_s
    assert sheet.rows[1][4].startswith(f"{factor:.2f}x ± ")
    error = 100 * (BETTER.predicted.step_s / found["better"].median_s - 1)
    assert float(sheet.rows[1][6]) == pytest.approx(error, abs=0.06)
    assert verdict.text == "the plans ran in the order that was predicted"


def test_another_order_is_told():
    """Where the faster plan ran slower, both orders stand there."""
    found = {"equal": Measured((1.0, 1.0), ("a",), ("plan",)), "better": Measured((2.0, 2.0), ("b",), ("plan",))}
    assert lines(found) == ["fastest first, they ran as equal, better; predicted was better, equal"]


def test_noise_and_a_missing_baseline_are_told():
    """A difference inside the margins is noise; without a trace of the baseline there is no speed-up."""
    base, near = ((1.0, 2.0, 3.0), (1.1, 1.9, 3.0))
    found = {"equal": Measured(base, ("a",), ("plan",)), "better": Measured(near, ("b",), ("plan",))}
    assert "within the noise" in lines(found)[0]
    slower = replace(found["better"], steps_s=(1.1, 2.1, 3.0))
    told = lines({"equal": found["equal"], "better": slower})
    assert told[1] == "the plans ran in the order that was predicted, as far as the noise tells"
    (sheet, line) = measured(PLANS, {"better": found["better"]})
    assert sheet.rows[0][4] == "-"
    assert "no trace is of equal" in line.text


def test_a_run_with_other_remat_is_told():
    """The trace says that the run rematerialised otherwise than the plan."""
    found = {"equal": Measured((1.0,), ("a",), ("always",))}
    assert any("'always'" in line for line in lines(found))


def test_json():
    """Every step, the median, the error and the margin; None without a trace."""
    found = assigned(PLANS, [("a", trace(EQUAL)), ("b", trace(BETTER))])
    data = measured_data(BETTER, found["better"], EQUAL, found["equal"])
    assert data["traces"] == ["b"]
    assert len(data["steps_s"]) == 3
    assert data["speed_up"] == pytest.approx(found["equal"].median_s / found["better"].median_s)
    assert measured_data(EQUAL, None, EQUAL, None) is None
