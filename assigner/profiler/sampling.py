"""Repeat a measurement until it is steady: median and spread of its samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARM_UP_RUNS = 3
WARM_UP_S = 0.2
MINIMUM_SAMPLES = 7
STEADY_SPREAD = 0.05
LIMIT_S = 2.0


@dataclass(frozen=True)
class Sample:
    """What repeated runs gave.

    Args:
        median: In the unit of the runs.
        spread: IQR / median.
        count: How many runs were counted.
    """

    median: float
    spread: float
    count: int


def summarise(values: Sequence[float]) -> Sample:
    """Median and spread of some values; one value has no spread."""
    median = statistics.median(values)
    if len(values) < 2 or median <= 0:
        return Sample(median, 0.0, len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(median, (high - low) / median, len(values))


@dataclass
class _Subject:
    """One thing under measurement: its runs so far, each a tuple of parts (forward, backward)."""

    run: Callable[[], tuple[float, ...]]
    runs: list[tuple[float, ...]]
    spent_s: float = 0.0

    def is_steady(self) -> bool:
        if self.spent_s >= LIMIT_S and len(self.runs) >= 3:
            return True
        if len(self.runs) < MINIMUM_SAMPLES:
            return False
        return all(summarise(part).spread < STEADY_SPREAD for part in zip(*self.runs, strict=True))

    def take(self) -> None:
        begin = time.perf_counter()
        self.runs.append(self.run())
        self.spent_s += time.perf_counter() - begin


def measure_interleaved(
    runs: Sequence[Callable[[], tuple[float, ...]]], on_round: Callable[[int, int], None] | None = None
) -> list[tuple[Sample, ...]]:
    """Measure several things in turn, so that they share the machine's drift.

    Each is warmed up by count and time, then run until the spread of all its parts is below 5 % with 7 samples or
    more, or 2 s are spent on it.

    Args:
        runs: Each call measures once and returns its parts, in seconds.
        on_round: Called with (steady ones, all) after each round.

    Returns:
        For each thing, one sample per part.
    """
    subjects = [_Subject(run, []) for run in runs]
    for subject in subjects:
        begin, count = time.perf_counter(), 0
        while count < WARM_UP_RUNS or time.perf_counter() - begin < WARM_UP_S:
            subject.run()
            count += 1
    waiting = list(subjects)
    while waiting:
        for subject in waiting:
            subject.take()
        waiting = [subject for subject in waiting if not subject.is_steady()]
        if on_round is not None:
            on_round(len(subjects) - len(waiting), len(subjects))
    return [tuple(summarise(part) for part in zip(*subject.runs, strict=True)) for subject in subjects]
