"""Sampling stops when it is steady, and a sample is long enough to see a stopped CPU."""

from __future__ import annotations

import itertools

import pytest

from assigner.profiler import sampling
from assigner.profiler.options import ProfileOptions
from assigner.profiler.sampling import measure_interleaved
from assigner.profiler.session import default_micro_batches
from assigner.samples import Samples


class Clock:
    """A clock that only the measured runs move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sampling, "time", made)
    return made


def test_median_and_spread() -> None:
    """The spread is the interquartile range over the median."""
    said = Samples((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (said.median_s, said.iqr_s, said.spread) == (3.0, pytest.approx(2.0), pytest.approx(2 / 3))
    assert Samples((7.0,)).spread == 0.0


def test_stops_that_hit_one_part_at_a_time_are_in_the_parts_together(clock: Clock) -> None:
    """Of three parts a stop hits another one each time: no median sees it, and that of the whole does."""
    turns = itertools.count()

    def run() -> tuple[float, ...]:
        hit = next(turns) % 3
        parts = tuple(length + (0.3 if n == hit else 0.0) for n, length in enumerate((0.1, 0.1, 0.2)))
        clock.now += sum(parts)
        return parts

    (found,) = measure_interleaved([run])
    assert [part.median_s for part in found] == pytest.approx([0.175, 0.175, 0.35])


def test_steady_runs_need_seven_samples(clock: Clock) -> None:
    """Runs that all take the same time are sampled seven times, whatever their length."""

    def run() -> tuple[float, float]:
        clock.now += 0.1
        return 0.03, 0.07

    ((forward, backward),) = measure_interleaved([run])
    assert (forward.median_s, backward.median_s) == (pytest.approx(0.03), pytest.approx(0.07))
    assert len(forward.seconds) == 7


def test_a_sample_averages_over_a_cpu_that_stands_still(clock: Clock) -> None:
    """Of a CPU that runs one of five times, a short run's figure holds its share of the stops."""
    turn = 0

    def run() -> tuple[float]:
        nonlocal turn
        turn += 1
        seconds = 0.001 if turn % 5 else 0.021  # every fifth run meets a stop of 20 ms
        clock.now += seconds
        return (seconds,)

    ((said,),) = measure_interleaved([run])
    assert said.median_s == pytest.approx(0.005)
    assert said.spread < 0.05


def test_unsteady_runs_end_by_time(clock: Clock) -> None:
    """What never becomes steady is given up after two seconds, and its spread says so."""
    turn = 0

    def run() -> tuple[float]:
        nonlocal turn
        turn += 1
        seconds = 0.1 if turn % 2 else 0.4
        clock.now += seconds
        return (seconds,)

    ((said,),) = measure_interleaved([run])
    assert said.spread > 0.5
    assert 7 <= len(said.seconds) <= 12
    ((longer,),) = measure_interleaved([run], patience=2.5)
    assert 2 * len(said.seconds) < len(longer.seconds) < 3 * len(said.seconds)


def test_a_part_of_little_weight_may_spread(clock: Clock) -> None:
    """What is below a tenth of all parts does not keep the others waiting."""
    turn = 0

    def run() -> tuple[float, float]:
        nonlocal turn
        turn += 1
        clock.now += 0.2
        return 0.2, 0.002 if turn % 2 else 0.01

    steady, small = measure_interleaved([run])[0]
    assert (len(steady.seconds), steady.spread) == (7, pytest.approx(0.0))
    assert small.spread > 0.5


@pytest.mark.parametrize(
    ("batch", "sizes"), [(1, (1,)), (2, (1, 2)), (7, (1, 7)), (32, (2, 8, 32)), (64, (4, 16, 64)), (6, (1, 6))]
)
def test_default_sizes_are_divisors(batch: int, sizes: tuple[int, ...]) -> None:
    """Two or more sizes wherever the batch has them, so that times are a line and not a guess."""
    assert default_micro_batches(batch) == sizes


def test_options_are_checked() -> None:
    """Values that cannot be used are refused by name."""
    with pytest.raises(ValueError, match="1 or more"):
        ProfileOptions(micro_batches=(0,))
    with pytest.raises(ValueError, match="reserve"):
        ProfileOptions(reserve=1.0)
