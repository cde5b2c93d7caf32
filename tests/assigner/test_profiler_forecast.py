"""Time left of a profiling run, with a clock of its own."""

import pytest

from assigner.profiler.rankprogress import Forecast, RankProgress, slowest


class Clock:
    """Seconds that a test moves on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_before_anything_is_measured_the_plan_counts():
    """Pieces times what one was said to take."""
    forecast = Forecast(Clock())
    assert forecast.left_s() is None
    assert forecast.share() == 0.0
    forecast.plan("point", 10, 2.0)
    forecast.plan("links", 3, 5.0)
    assert forecast.left_s() == pytest.approx(35.0)
    assert forecast.share() == 0.0


@pytest.mark.parametrize("pace", [0.25, 1.0, 4.0])
def test_what_is_left_follows_the_pace_of_what_is_done(pace):
    """From a quarter of the way on the time left is right within a factor of 2, whatever the plan said."""
    clock = Clock()
    forecast = Forecast(clock)
    forecast.plan("point", 20, 1.0)
    forecast.work("point", 0)
    for done in range(1, 21):
        clock.now += pace
        forecast.work("point", done)
        left = (20 - done) * pace
        if done >= 5:
            assert left / 2 <= forecast.left_s() <= left * 2
            assert 0 <= forecast.share() <= 1
    assert forecast.left_s() == 0
    assert forecast.share() == 1


def test_each_kind_of_work_has_its_own_pace():
    """Slow links say nothing of the points."""
    clock = Clock()
    forecast = Forecast(clock)
    forecast.plan("point", 4, 1.0)
    forecast.plan("links", 2, 1.0)
    forecast.begin("links")
    clock.now += 9
    forecast.work("links", 1)
    assert forecast.left_s() == pytest.approx(4 * 1.0 + (1 + 9) / 2)


def test_the_slowest_rank_is_shown():
    """The run takes as long as that one."""
    fast, slow = RankProgress("worker:0/cpu", "links", 0.9, 1.0), RankProgress("worker:1/cpu", "compute", 0.1, 90.0)
    assert slowest([fast, slow]) is slow
    starting = RankProgress("worker:2/cpu", "tracing the model", 0.0, None)
    assert slowest([fast, slow, starting]) is starting
