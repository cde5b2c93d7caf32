"""The steps of runs as statistics: which plan a trace is of, the median with its spread, how sure a speed-up is.

How sure the ratio of two medians is: the percentile interval of a bootstrap (Efron 1979, Bootstrap methods).

A resample of n values is n of them drawn with replacement, and its median is one of the sorted values (or the mean of
two), at the rank of a median of n uniform numbers. That rank has a beta distribution, so each resample's median is
drawn at once from that: the same distribution as with all n draws, whatever n is.

It takes steps for independent. Steps of a run are not quite that: what slows one often slows the next, so the interval
is rather too narrow than too wide.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.trace import unlike
from assigner.samples import Samples
from assigner.validation.machine import busy_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.trace import Trace

LEAST = 10
"""Values below which there is no interval: the resamples of so few say little of what was not seen."""
LEVEL = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True)
class Steps(Samples):
    """The steps of all traces of one plan whose runs rematerialised alike, and the files of these traces.

    `remat` is what they did with the plan's rematerialisation: "plan", or what else a trace says; `busy` is where other
    programs took the processor's time, as `busy_run` says it.
    """

    traces: tuple[str, ...]
    remat: str = "plan"
    busy: str | None = None

    @property
    def planned(self) -> bool:
        """Whether the runs did what the plan says; only then its prediction is of them."""
        return self.remat == "plan"

    def error(self, plan: Plan) -> float | None:
        """How far the plan's prediction is above (+) or below (-) the median, as a share of that.

        None: there is no prediction, or the runs did something else.
        """
        said = plan.predicted_step_s if self.planned else None
        factor = fmt.against(said, self.median_s)
        return None if factor is None else factor - 1


PlanRuns = tuple[Steps, ...]
"""What was measured of one plan: runs that rematerialised alike together, first those that did what the plan says."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast one plan ran as another, by the medians, and the interval of `ratio_interval`."""

    factor: float
    interval: tuple[float, float] | None = None

    @property
    def clear(self) -> bool | None:
        """Whether it is more than noise; None: not known."""
        return None if self.interval is None else not self.interval[0] <= 1 <= self.interval[1]


def runs_by_plan(plans: Sequence[tuple[str, Plan]], traces: Sequence[tuple[str, Trace]]) -> dict[str, PlanRuns]:
    """Each plan's traces, found by what they say was run: workload, stages, split and schedule; both with names.

    Raises:
        FormatError: a trace is of none of the plans.
    """
    found: dict[str, list[tuple[str, Trace]]] = {}
    for file, trace in traces:
        fitting = [name for name, plan in plans if not unlike(trace, plan)]
        if not fitting:
            name, plan = min(plans, key=lambda each: len(unlike(trace, each[1])))
            other = ", ".join(each.replace("_", "-") for each in unlike(trace, plan))
            raise FormatError(
                f"{file} is of a run of none of these plans: from {name}, the nearest, it differs in its {other}",
                hint="name the plan that the run was started with",
            )
        for name in fitting:
            found.setdefault(name, []).append((file, trace))
    return {name: _together(mine) for name, mine in found.items()}


def _together(traces: Sequence[tuple[str, Trace]]) -> PlanRuns:
    """The traces of one plan by what their runs rematerialised: other memory and other times do not mix."""
    kinds: dict[str, list[tuple[str, Trace]]] = {}
    for file, trace in traces:
        kinds.setdefault(_remat(trace), []).append((file, trace))
    order = sorted(kinds, key=lambda remat: remat != "plan")
    return tuple(
        Steps(
            tuple(step for _, trace in kinds[remat] for step in trace.step_s),
            tuple(file for file, _ in kinds[remat]),
            remat,
            busy_run(*(trace for _, trace in kinds[remat])),
        )
        for remat in order
    )


def _remat(trace: Trace) -> str:
    """What the run did; "never" and "always" are the plan's own where it says just that."""
    again = sum(len(stage.rematerialise) for stage in trace.stages)
    own = {0: "never", sum(len(stage.partitions) for stage in trace.stages): "always"}.get(again)
    return "plan" if trace.remat == own else trace.remat


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> tuple[float, float] | None:
    """Between what the ratio of the medians of two samples lies, to about 95 % for independent values.

    The same samples give the same interval. None: the samples have fewer values than `LEAST`, do not vary at all, or
    the lower one has values of zero.
    """
    if min(len(upper), len(lower)) < LEAST or min(lower) <= 0:
        return None
    rng, above, below = random.Random(0), sorted(upper), sorted(lower)  # noqa: S311
    ratios = sorted(_median(rng, above) / _median(rng, below) for _ in range(_RESAMPLES))
    left_out = round(_RESAMPLES * (1 - LEVEL) / 2)
    low, high = ratios[left_out], ratios[-left_out - 1]
    return (low, high) if low < high else None


def _median(rng: random.Random, values: Sequence[float]) -> float:
    """The median of one resample of sorted values."""
    count, half = len(values), len(values) // 2
    if count % 2:
        return values[int(count * rng.betavariate(half + 1, half + 1))]
    before = rng.betavariate(half, half + 1)
    after = 1 - (1 - before) * (1 - rng.random()) ** (1 / half)  # the least of `half` uniform numbers above it
    return (values[int(count * before)] + values[min(count - 1, int(count * after))]) / 2


def speed_up(plan: Plan, mine: Steps, baseline: Plan, base: Steps | None) -> SpeedUp | None:
    """By samples a second, so that batches may differ."""
    if base is None or not mine.median_s:
        return None
    share = plan.workload.batch_size / baseline.workload.batch_size
    interval = ratio_interval(base.seconds, mine.seconds)
    return SpeedUp(share * base.median_s / mine.median_s, interval and (share * interval[0], share * interval[1]))


def overtaken(before: tuple[Plan, Steps], after: tuple[Plan, Steps]) -> bool:
    """Whether the plan that was predicted to be slower ran faster, by more than noise as far as that is known."""
    gain = speed_up(*after, *before)
    return gain is not None and gain.factor > 1 and gain.clear is not False
