"""The interval of a ratio of medians."""

import random
from statistics import median

import pytest

from assigner.validation import steps
from assigner.validation.steps import LEAST, ratio_interval

DRAWS = {
    "normal": lambda rng: rng.gauss(1, 0.05),
    "skewed": lambda rng: 1 + rng.expovariate(1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [("normal", 25), ("skewed", LEAST)])
def test_like_samples_are_seldom_called_different(monkeypatch, shape, count):
    """Of 400 pairs of samples from one distribution the interval leaves out 1 in fewer than 10 %, and in some."""
    monkeypatch.setattr(steps, "_RESAMPLES", 200)
    rng = random.Random(7)
    told = 0
    for _ in range(400):
        one, other = ([DRAWS[shape](rng) for _ in range(count)] for _ in range(2))
        low, high = ratio_interval(one, other)
        told += not low <= 1 <= high
    assert 2 <= told < 40


@pytest.mark.parametrize("count", [10, 11])
def test_resamples_are_those_of_a_plain_bootstrap(count):
    """As many of the drawn medians are below each value as of the medians of resamples; odd counts and even ones."""
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(0, 0.3) for _ in range(count))
    drawn = [steps._median(rng, values) for _ in range(10_000)]
    plain = [median(rng.choices(values, k=count)) for _ in range(10_000)]
    for value in values:
        below = [sum(each <= value for each in medians) / 10_000 for medians in (drawn, plain)]
        assert below[0] == pytest.approx(below[1], abs=0.03)


def test_a_clear_difference_is_found():
    """Twenty steps that take 20 % longer are told apart from the others."""
    rng = random.Random(5)
    slow, fast = ([centre * rng.gauss(1, 0.03) for _ in range(20)] for centre in (1.2, 1.0))
    low, high = ratio_interval(slow, fast)
    assert 1.1 < low < 1.2 < high < 1.3


def test_no_interval_where_there_is_nothing_to_tell():
    """Too few values, values that do not vary, or steps that took no time."""
    assert ratio_interval([1.0, 2.0] * 20, [0.0] * 10 + [1.0] * 20) is None
    assert ratio_interval([1.0, 2.0] * 4, [1.0, 2.0] * 20) is None
    assert ratio_interval([1.0] * 20, [2.0] * 20) is None
