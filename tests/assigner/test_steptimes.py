"""What a run says of its steps to the launcher that started it."""

import os
from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError
from assigner.launch.failurereport import VARIABLE
from assigner.launch.steptimes import StepClock, StepTimes, handed_over
from assigner.report.measured import step_times_text
from assigner.schedule.simulate import priced


@pytest.fixture
def plan():
    profile = make_profile(work=[2e-3] * 4, slowness=[1.0, 1.0], batch=8)
    return priced(make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), profile)


@pytest.fixture
def listens(tmp_path, monkeypatch):
    """A launcher that has started this process."""
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} {tmp_path}")
    return tmp_path


def test_whole_steps_but_the_first_are_handed_over(plan, listens):
    """The first sets up connections and memory; others did not run the plan's whole program."""
    clock = StepClock(plan, "plan")
    clock.hand_over()
    assert handed_over(listens) is None
    for whole in (True, True, False, True):
        clock.begin_step()
        clock.end_step(whole=whole)
    clock.hand_over()
    found = handed_over(listens)
    assert (found.plan, found.remat, len(found.seconds)) == (plan, "plan", 2)
    assert min(found.seconds) > 0


def test_nothing_is_written_where_nobody_listens(plan, tmp_path, monkeypatch):
    """Under torchrun, or in a process that a rank has started."""
    monkeypatch.setenv(VARIABLE, f"1 {tmp_path}")
    clock = StepClock(plan, "plan")
    for _ in range(2):
        clock.begin_step()
        clock.end_step(whole=True)
    clock.hand_over()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "after", "updates", "words"),
    [
        (1.0, 1.0, False, "3 steps added to the gradients (update=False), and no update followed"),
        (1.0, 2.0, False, "3 steps left the update to the script (update=False)"),
        (None, None, False, "3 steps added to the gradients (update=False), and no pipeline.optimizer.step() followed"),
        (1.0, 1.0, True, "3 steps left the update to the script (update=False)"),
    ],
    ids=["forgotten", "an optimizer of its own", "a rank without weights", "accumulated"],
)
def test_steps_without_an_update_are_said_to_have_no_time(listens, plan, before, after, updates, words):
    """Each has a part of what is predicted; where no update followed on any, that is said, as far as it is known."""
    clock = StepClock(plan, "plan")
    for _ in range(3):
        clock.begin_step(lambda: before)
        clock.end_step(whole=False, gathers=True)
    if updates:
        clock.note_update()
    clock.hand_over(lambda: after)
    line = step_times_text(handed_over(listens), plan)
    assert words in line
    assert "micro-batches" not in line


def test_steps_of_other_micro_batches_are_told_apart(listens, plan):
    """Both kinds in one line, each with its number."""
    clock = StepClock(plan, "plan")
    for gathers in (True, False, False):
        clock.begin_step()
        clock.end_step(whole=False, gathers=gathers)
    clock.note_update()
    clock.hand_over()
    line = step_times_text(handed_over(listens), plan)
    assert line.endswith(
        "1 step left the update to the script (update=False); 2 steps had other micro-batches than the plan"
    )


def test_what_is_no_step_time_is_refused(listens):
    """The shape of what a rank has written is checked."""
    (listens / "step-times").write_text('{"plan": 3}')
    with pytest.raises(FormatError):
        handed_over(listens)


def test_the_line_has_both_sides_and_what_they_are_apart(plan):
    """Predicted, measured with its spread, and by how much the prediction is off."""
    step = plan.predicted.step_s
    line = step_times_text(StepTimes(plan, "plan", (1.1 * step, 1.25 * step, 1.4 * step)), plan)
    assert line.startswith("step: ")
    assert "predicted" in line
    assert "over 3 steps" in line
    assert line.endswith("the prediction is 20.0 % too low")


def test_a_prediction_of_another_run_is_not_put_beside_it(plan):
    """Other rematerialisation, another plan than the one that the run was started with, or no prediction at all."""
    moved = replace(plan, stages=tuple(replace(each, rematerialise=each.partitions) for each in plan.stages))
    for found, started, why in (
        (StepTimes(plan, "always", (0.1,)), plan, "'always', not as the plan says"),
        (StepTimes(moved, "plan", (0.1,)), plan, "ran another plan"),
        (StepTimes(plan, "plan", (0.1,)), replace(plan, predicted=None), "the plan has no prediction"),
    ):
        line = step_times_text(found, started)
        assert line.startswith("step: 100 ms measured (median of 1 step); ")
        assert why in line
