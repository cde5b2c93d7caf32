"""Traces beside the plans that they ran."""

import inspect
from dataclasses import replace

import pytest
from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.errors import FormatError
from assigner.report.measured import measured, measured_data
from assigner.runtime.pipeline import Pipeline
from assigner.schedule.simulate import priced
from assigner.validation.steps import Steps, runs_by_plan, speed_up

PROFILE = make_profile(work=[2e-3] * 4, slowness=[1, 3])


def plan(*stages, micro_batches=4):
    return priced(make_plan(PROFILE, stages, micro_batches=micro_batches), PROFILE)


EQUAL = plan((0, ["p0", "p1"]), (1, ["p2", "p3"]))
BETTER = plan((0, ["p0", "p1", "p2"]), (1, ["p3"]))
PLANS = [("equal", EQUAL), ("better", BETTER)]


def trace(of, *, slower=1.0, steps=3):
    return run_in(slower_worker(PROFILE, 1, forward=slower, backward=slower), of, steps=steps)


def of(*steps, remat="plan"):
    """What runs of these step times would be, as one trace."""
    return (Steps(steps, ("a",), remat),)


def spread(centre, count=12):
    """Step times around a centre, 1 % apart."""
    return tuple(centre * (1 + 0.01 * (n - count // 2)) for n in range(count))


def lines(found):
    """But for what is said of predictions."""
    return [part.text for part in measured(PLANS, found)[1:] if "the prediction is " not in part.text]


def test_a_trace_finds_its_plan():
    """Each trace goes to the plan that it ran, several of one plan are put together."""
    found = runs_by_plan(PLANS, [("a", trace(BETTER)), ("b", trace(EQUAL)), ("c", trace(BETTER, slower=1.1))])
    assert [each.traces for each in found["better"]] == [("a", "c")]
    assert [each.traces for each in found["equal"]] == [("b",)]
    assert len(found["better"][0].seconds) == 6
    assert found["equal"][0].median_s == pytest.approx(EQUAL.predicted.step_s, rel=0.01)


def test_a_run_that_others_starved_is_told():
    """Where other programs took the processor's time the table says so, by plan and worker."""
    quiet = trace(BETTER)
    first, *others = quiet.workers
    starved = replace(quiet, workers=(replace(first, starved=0.4), *others))
    found = runs_by_plan(PLANS, [("a", trace(EQUAL)), ("b", quiet), ("c", starved)])
    (told,) = [text for text in lines(found) if "busy" in text]
    assert told == (
        "better: the run was on a busy machine: other programs had up to 40 % of the time of worker:0; its steps took"
        " longer"
    )


def test_a_trace_of_none_of_the_plans_is_refused():
    """The error names the file, the nearest plan, and what differs from it."""
    other = plan((0, ["p0", "p1"]), (1, ["p2", "p3"]), micro_batches=2)
    with pytest.raises(
        FormatError, match=r"x\.json .* none of these plans: from equal.* micro-batches, micro-batch-size"
    ):
        runs_by_plan(PLANS, [("x.json", trace(other))])


def test_one_plan_under_two_names_gets_its_trace_twice():
    """Both names have it."""
    found = runs_by_plan([("one", EQUAL), ("two", EQUAL)], [("a", trace(EQUAL))])
    assert found["one"] == found["two"]


def test_speed_up_with_its_interval():
    """Half the step is twice as fast, between what the medians' resamples give; a like run is within the noise."""
    base, half, like = (Steps(spread(each), ("a",)) for each in (4.0, 2.0, 4.02))
    gain = speed_up(EQUAL, half, EQUAL, base)
    assert gain.factor == 2.0
    low, high = gain.interval
    assert 1.85 < low < 2.0 < high < 2.15
    assert gain.clear
    assert speed_up(EQUAL, like, EQUAL, base).clear is False
    assert speed_up(EQUAL, half, EQUAL, base) == gain, "the draws are seeded"


@pytest.mark.parametrize("steps", [(2.0,), spread(2.0, 9), (2.0,) * 20])
def test_few_or_like_steps_have_no_interval(steps):
    """Below ten steps, and where all are the same, nothing is said of how sure a factor is."""
    mine = Steps(steps, ("a",))
    assert speed_up(EQUAL, mine, EQUAL, mine).clear is None
    sheet, *said = measured(PLANS, {"equal": of(*steps), "better": of(*steps)})
    assert sheet.rows[1][4] == "1.00x"
    assert "interval" not in sheet.title
    assert any("fewer than 10 steps of equal, better" in line.text for line in said) == (len(steps) < 10)


def test_batches_of_other_sizes_compare_by_samples():
    """Twice the batch in the same time is twice as fast, and so are both ends of the interval."""
    double = replace(EQUAL, workload=replace(EQUAL.workload, batch_size=16), micro_batch_size=4)
    same = Steps(spread(2.0), ("a",))
    gain = speed_up(double, same, EQUAL, same)
    assert gain.factor == 2.0
    assert gain.interval == tuple(2 * end for end in speed_up(EQUAL, same, EQUAL, same).interval)


def test_table_and_verdict():
    """Median, IQR, speed-up over the baseline and the prediction's error; the order is told."""
    found = runs_by_plan(PLANS, [("a", trace(EQUAL)), ("b", trace(BETTER, slower=1.2))])
    sheet, _, verdict = measured(PLANS, found)
    assert [row[0] for row in sheet.rows] == ["equal", "better"]
    assert sheet.rows[0][4] == "baseline"
    medians = found["equal"][0].median_s, found["better"][0].median_s
    assert sheet.rows[1][4] == f"{medians[0] / medians[1]:.2f}x"
    error = 100 * (BETTER.predicted.step_s / medians[1] - 1)
    assert float(sheet.rows[1][6]) == pytest.approx(error, abs=0.06)
    assert verdict.text == "the plans ran in the order that was predicted"


def test_the_title_says_of_which_steps_the_figures_are():
    """A trace keeps the last steps of its run, as many as `Pipeline.trace` does where nothing else is asked for."""
    default = inspect.signature(Pipeline.trace).parameters["last"].default
    assert f"the steps in the traces (a run's last {default}, unless" in measured(PLANS, {"equal": of(2.0)})[0].title


def test_the_interval_stands_in_the_table():
    """Behind the factor, and the title says what it is and what it takes for granted."""
    sheet = measured(PLANS, {"equal": of(*spread(2.0)), "better": of(*spread(1.0))})[0]
    factor, low, to, high = sheet.rows[1][4].split()
    assert (factor, to) == ("2.00x", "to")
    assert float(low.strip("(")) < 2 < float(high.strip(")"))
    assert "95 % interval, as if steps were independent" in sheet.title


def test_a_prediction_that_is_far_off_is_told():
    """With who says why; of one that is within what the documentation claims nothing is said."""
    said = BETTER.predicted.step_s
    for factor, words in ((2.0, ["49.7 % too low"]), (1.1, []), (0.8, ["25.6 % too high"])):
        told = [part.text for part in measured(PLANS, {"better": of(*spread(factor * said))})[1:]]
        ends = " too ", ": simulate --against TRACE says where that comes from"
        assert [text for text in told if ends[0] in text] == [
            f"better: the prediction is {word}{ends[1]}" for word in words
        ]


def test_another_order_is_told():
    """Where the faster plan ran slower, both orders stand there."""
    found = {"equal": of(*spread(1.0)), "better": of(*spread(2.0))}
    assert lines(found) == ["fastest first, they ran as equal, better; predicted was better, equal"]


def test_noise_and_a_missing_baseline_are_told():
    """A difference inside the interval is noise; without a trace of the baseline there is no speed-up."""
    found = {"equal": of(*spread(2.0)), "better": of(*spread(2.01))}
    assert lines(found) == [
        "better and equal: the measured difference is within the noise",
        "the plans ran in the order that was predicted, as far as the noise tells",
    ]
    other = {"equal": of(*spread(2.01)), "better": of(*spread(2.0))}
    assert lines(other) == lines(found), "a predicted order, by noise alone"
    (sheet, line, _) = measured(PLANS, {"better": found["better"]})
    assert sheet.rows[0][4] == "-"
    assert "no trace is of equal" in line.text


def test_runs_with_other_remat_stand_apart():
    """They are in no median of the plan's own runs, and the prediction has no error there; both is said."""
    own, again = trace(EQUAL), replace(trace(EQUAL, slower=2.0), remat="always")
    found = runs_by_plan(PLANS, [("again", again), ("own", own), ("b", trace(BETTER))])
    assert [each.traces for each in found["equal"]] == [("own",), ("again",)]
    assert found["equal"][0].median_s == pytest.approx(EQUAL.predicted.step_s, rel=0.01)
    sheet, *said = measured(PLANS, found)
    assert [row[0] for row in sheet.rows] == ["equal", "equal (remat always)", "better"]
    assert sheet.rows[1][5:] == ("-", "-")
    assert sheet.rows[0][6] == "0.0"
    assert "by 'always', not as the plan says" in said[0].text
    data = measured_data(EQUAL, found["equal"], EQUAL, found["equal"])
    assert (data["remat"], [each["remat"] for each in data["apart"]]) == ("plan", ["always"])
    assert data["apart"][0]["error"] is None


def test_a_run_with_other_remat_says_nothing_of_the_prediction():
    """Where no run did what the plan says, there is no error and no verdict on the order."""
    found = {"equal": of(*spread(9.0), remat="always"), "better": of(*spread(1.0))}
    assert found["equal"][0].error(EQUAL) is None
    assert not any("order" in line for line in lines(found))


@pytest.mark.parametrize(("remat", "again"), [("never", ()), ("always", ("p0", "p1"))])
def test_remat_that_is_the_plans_own_is_as_planned(remat, again):
    """A run that rematerialised nothing is that of a plan which says so; and all of all."""
    stages = tuple(replace(each, rematerialise=each.partitions if again else ()) for each in EQUAL.stages)
    mine = replace(EQUAL, stages=stages)
    found = runs_by_plan([("mine", mine)], [("a", replace(trace(mine), remat=remat))])
    assert found["mine"][0].planned


def test_json():
    """Every step, the median, the error and the interval; None without a trace."""
    found = runs_by_plan(PLANS, [("a", trace(EQUAL)), ("b", trace(BETTER))])
    data = measured_data(BETTER, found["better"], EQUAL, found["equal"])
    assert data["traces"] == ["b"]
    assert len(data["steps_s"]) == 3
    assert data["speed_up"] == pytest.approx(found["equal"][0].median_s / found["better"][0].median_s)
    assert data["speed_up_interval"] is None
    sure = measured_data(BETTER, of(*spread(1.0)), EQUAL, of(*spread(2.0)))
    assert sure["speed_up_interval"][0] < 2 < sure["speed_up_interval"][1]
    assert measured_data(EQUAL, None, EQUAL, None) is None
