"""Measurements of work on a device, repeated until they are steady: its clock, median and spread of its samples.

A worker with a CPU quota runs for a moment and then stands still: a short run mostly falls between two stops, and the
median of single runs would never see them. So the time of a thread that has a share of a core is its processor time,
divided by that share, unless it has waited for something else. Several threads spin while they wait for one that stands
still, and no processor time tells: for them a sample is the mean of as many runs as take 150 ms or more, more than one
of a quota's usual periods. Of several parts that are timed in one run a stop hits one, and the median of none sees it:
their medians are made to add up to that of the whole.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from assigner.machine.starvation import DISTURBED, allowed_share
from assigner.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

if sys.platform == "linux":
    import resource

WARM_UP_RUNS = 3
WARM_UP_S = 0.2
SAMPLE_S = 0.15
MINIMUM_SAMPLES = 7
STEADY_SPREAD = 0.05
LIMIT_S = 2.0
_TELLING = 0.1  # of all parts: a smaller one may spread

T = TypeVar("T")


class Stopwatch:
    """Marks along some work, and the seconds between them.

    On a GPU the marks are events, which the device itself dates. On a CPU they are of the clock; of the calling
    thread's processor time where that computes alone, has a share of a core, and has not waited for anything but the
    processor.

    `launch_share` is the share of the last work's time that the host took to hand it over. Near 1 the device waits for
    the host, and its time says little about it (always 1 on a CPU).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launch_share = 1.0
        computes_alone = sys.platform == "linux" and device.type == "cpu" and torch.get_num_threads() == 1
        self._share = allowed_share(1) if computes_alone else 1.0
        self._marks: list[tuple[tuple[str, ...], Any]] = []
        self._begin_s = 0.0

    def mark(self, *owner: str) -> None:
        """Note the present point: what has passed since the last mark is the owner's.

        The first mark waits until the device has nothing left to do.
        """
        if not self._marks:
            self._wait()
            self._begin_s = time.perf_counter()
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((owner, event))
        else:
            self._marks.append((owner, time.perf_counter() if self._share == 1 else _ThreadTime.now()))

    def seconds(self) -> list[float]:
        """Seconds between the marks, which are then forgotten."""
        marks = [date for _, date in self._marks]
        self._marks = []
        if self.device.type != "cuda":
            if self._share == 1:
                return [end - begin for begin, end in itertools.pairwise(marks)]
            return [end.since(begin, self._share) for begin, end in itertools.pairwise(marks)]
        launched_s = time.perf_counter() - self._begin_s
        self._wait()
        self.launch_share = launched_s / max(launched_s, time.perf_counter() - self._begin_s)
        return [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(marks)]

    def by_owner(self) -> Mapping[tuple[str, ...], float]:
        """The same by owner, added up; of one without a mark 0."""
        owners, found = [owner for owner, _ in self._marks[1:]], defaultdict[tuple[str, ...], float](float)
        for owner, seconds in zip(owners, self.seconds(), strict=True):
            found[owner] += seconds
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _ThreadTime(NamedTuple):
    """Of the calling thread: the clock, its processor time, and how often it has gone to sleep by itself."""

    clock_s: float
    computed_s: float
    waits: int

    @classmethod
    def now(cls) -> _ThreadTime:
        assert sys.platform == "linux", "elsewhere the clock is all that is looked at"
        return cls(time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)

    def since(self, begin: _ThreadTime, share: float) -> float:
        """Seconds from another time on, for a thread that has this share of a core."""
        if self.waits > begin.waits:
            return self.clock_s - begin.clock_s
        return (self.computed_s - begin.computed_s) / share


@dataclass
class _Subject:
    """One thing under measurement."""

    run: Callable[[], tuple[float, ...]]  # measures once; returns its parts (forward, backward) in seconds
    limit_s: float  # how long it is sampled at most
    runs_in_sample: int = 1  # how many runs make one sample
    samples: list[tuple[float, ...]] = field(default_factory=list)  # the samples so far, each with one mean per part
    pending: list[tuple[float, ...]] = field(default_factory=list)  # the runs of the sample that is being taken
    spent_s: float = 0.0  # time spent on samples
    run_s: float = 0.0  # of one run, when it was warmed up

    def warm_up(self) -> None:
        begin, count = time.perf_counter(), 0
        while count < WARM_UP_RUNS or time.perf_counter() - begin < WARM_UP_S:
            self.run()
            count += 1
        self.run_s = (time.perf_counter() - begin) / count
        self.runs_in_sample = max(1, math.ceil(SAMPLE_S / self.run_s))

    def take_run(self) -> None:
        begin = time.perf_counter()
        self.pending.append(self.run())
        self.spent_s += time.perf_counter() - begin

    def close_sample(self) -> None:
        self.samples.append(tuple(statistics.fmean(part) for part in zip(*self.pending, strict=True)))
        self.pending.clear()

    def left_s(self) -> float:
        """About how long it will still take: up to the fewest samples, then half of what the limit leaves."""
        if len(self.samples) < MINIMUM_SAMPLES:
            each_s = self.spent_s / len(self.samples) if self.samples else max(SAMPLE_S, self.run_s)
            most_s = max(self.limit_s - self.spent_s, each_s * max(0, 3 - len(self.samples)))
            return min(most_s, each_s * (MINIMUM_SAMPLES - len(self.samples)))
        return max(0.0, self.limit_s - self.spent_s) / 2

    def is_steady(self) -> bool:
        if self.spent_s >= self.limit_s and len(self.samples) >= 3:
            return True
        if len(self.samples) < MINIMUM_SAMPLES:
            return False
        parts = [Samples(part) for part in zip(*self.samples, strict=True)]
        telling = _TELLING * sum(part.median_s for part in parts)
        return all(part.spread < STEADY_SPREAD for part in parts if part.median_s >= telling)


def least_disturbed(measure: Callable[[], T], starved: Callable[[T], float], *, once: bool) -> T:
    """Measure, a second time where others had much of the processor time, and keep what they disturbed less."""
    first = measure()
    return first if once or starved(first) < DISTURBED else min(first, measure(), key=starved)


def measure_interleaved(
    runs: Sequence[Callable[[], tuple[float, ...]]],
    on_round: Callable[[float], None] = lambda _share: None,
    *,
    patience: float = 1.0,
) -> list[tuple[Samples, ...]]:
    """Measure several things in turn, so that they share the machine's drift and evict each other's caches.

    Each is warmed up by count and time, then sampled until the spread of all its parts of some size is below 5 % with 7
    samples or more, or its time is spent. `patience` is how many times the usual limit that is at most, 1 or more;
    three times it always is sampled.

    A call measures once and returns the parts, in seconds; `on_round` is called after each round with the share that is
    done, by time. Given back are, for each thing, the samples of each part.
    """
    begin = time.perf_counter()
    subjects = [_Subject(run, LIMIT_S * max(1.0, patience)) for run in runs]

    def tell(left_s: float) -> None:
        elapsed = time.perf_counter() - begin
        on_round(elapsed / (elapsed + left_s))

    for n, subject in enumerate(subjects, 1):
        subject.warm_up()
        warm = sum(each.left_s() for each in subjects[:n])
        tell(warm + (len(subjects) - n) * (warm / n + (time.perf_counter() - begin) / n))
    waiting = list(subjects)
    while waiting:
        for turn in range(max(subject.runs_in_sample for subject in waiting)):
            for subject in waiting:
                if turn < subject.runs_in_sample:
                    subject.take_run()
        for subject in waiting:
            subject.close_sample()
        waiting = [subject for subject in waiting if not subject.is_steady()]
        tell(sum(subject.left_s() for subject in waiting))
    return [_parts(subject.samples) for subject in subjects]


def _parts(samples: Sequence[tuple[float, ...]]) -> tuple[Samples, ...]:
    """Of each part, scaled so that their medians are together as long as that of the whole."""
    parts = list(zip(*samples, strict=True))
    whole, together = statistics.median(map(sum, samples)), sum(statistics.median(part) for part in parts)
    share = whole / together if together > 0 else 1.0
    return tuple(Samples(tuple(share * seconds for seconds in part)) for part in parts)
