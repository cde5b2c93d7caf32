"""What runs of the compared plans took: the median step with its spread, and what that makes of the predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.plan import Plan
    from assigner.trace import Trace

_NOTCH = 1.57
"""McGill, Tukey and Larsen, Variations of box plots, 1978: a median is sure to 1.57 IQR / sqrt(n), to about 95 %."""


@dataclass(frozen=True)
class Measured:
    """The steps of all traces of one plan.

    Args:
        steps_s: Seconds of each.
        traces: Their files.
        remat: What those runs did with the plan's rematerialisation, each once.
    """

    steps_s: tuple[float, ...]
    traces: tuple[str, ...]
    remat: tuple[str, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return median(self.steps_s)

    @property
    def iqr_s(self) -> float:
        """How far the middle half spreads."""
        if len(self.steps_s) < 2:
            return 0.0
        low, _, high = quantiles(self.steps_s, n=4, method="inclusive")
        return high - low

    @property
    def margin(self) -> float | None:
        """How sure the median is, as a share of it; None: one step tells nothing of that."""
        return _NOTCH * self.iqr_s / math.sqrt(len(self.steps_s)) / self.median_s if len(self.steps_s) > 1 else None

    def error(self, plan: Plan) -> float | None:
        """How far the plan's prediction is above (+) or below (-) the median, as a share of that."""
        factor = fmt.against(plan.predicted.step_s if plan.predicted else None, self.median_s)
        return None if factor is None else factor - 1


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast one plan ran as another; `margin`: how sure that is, None: not known."""

    factor: float
    margin: float | None

    @property
    def clear(self) -> bool | None:
        """Whether it is more than noise; None: not known."""
        return None if self.margin is None else abs(self.factor - 1) > self.margin


def assigned(plans: Sequence[tuple[str, Plan]], traces: Sequence[tuple[str, Trace]]) -> dict[str, Measured]:
    """Each plan's traces, found by what they say was run: workload, stages, split and schedule.

    Args:
        plans: Names and plans.
        traces: File names and traces.

    Raises:
        FormatError: a trace is of none of the plans.
    """
    found: dict[str, list[tuple[str, Trace]]] = {}
    for file, trace in traces:
        fitting = [name for name, plan in plans if not _unlike(trace, plan)]
        if not fitting:
            name, plan = min(plans, key=lambda each: len(_unlike(trace, each[1])))
            other = ", ".join(_unlike(trace, plan))
            raise FormatError(
                f"{file} is of a run of none of these plans: from {name}, the nearest, it differs in its {other}",
                hint="name the plan that the run was started with",
            )
        for name in fitting:
            found.setdefault(name, []).append((file, trace))
    return {
        name: Measured(
            tuple(step for _, trace in mine for step in trace.step_s),
            tuple(file for file, _ in mine),
            tuple(dict.fromkeys(trace.remat for _, trace in mine)),
        )
        for name, mine in found.items()
    }


def _unlike(trace: Trace, plan: Plan) -> list[str]:
    """In what a trace is of another plan, by `check_same_plan`'s own measure."""
    from assigner.trace import check_same_plan

    try:
        check_same_plan(trace, plan)
    except FormatError:
        names = ("workload", "stages", "schedule", "micro_batches", "micro_batch_size")
        return [name.replace("_", "-") for name in names if getattr(plan, name) != getattr(trace, name)]
    return []


def speed_up(plan: Plan, mine: Measured, baseline: Plan, base: Measured | None) -> SpeedUp | None:
    """By samples a second, so that batches may differ; the margins of two medians add up as squares."""
    if base is None:
        return None
    factor = (plan.workload.batch_size / mine.median_s) / (baseline.workload.batch_size / base.median_s)
    if mine.margin is None or base.margin is None:
        return SpeedUp(factor, None)
    return SpeedUp(factor, factor * math.hypot(mine.margin, base.margin))


def measured(plans: Sequence[tuple[str, Plan]], found: Mapping[str, Measured], *, digits: int | None = None) -> Report:
    """The table of what was measured, and sentences on what it means.

    Args:
        plans: Names and plans; the first is the baseline.
        found: What `assigned` gives.
        digits: Behind the point; None: as many as suit.
    """
    if not found:
        return ()
    base_name, baseline = plans[0]
    base = found.get(base_name)
    time = fmt.time_unit(*(each.median_s for each in found.values()))
    rows = []
    for name, plan in plans:
        if name in found:
            mine = found[name]
            gain = None if name == base_name else speed_up(plan, mine, baseline, base)
            rows.append(
                (
                    name,
                    fmt.count(len(mine.steps_s)),
                    time.show(mine.median_s, digits=digits),
                    time.show(mine.iqr_s, digits=digits),
                    "baseline" if name == base_name else _gain_text(gain, digits),
                    time.show(plan.predicted.step_s if plan.predicted else None, digits=digits),
                    fmt.points(mine.error(plan), sign=True, digits=digits),
                )
            )
    columns = (
        Column("plan", "text"), Column("steps", rank=1), Column(f"measured {time.name}"), Column(f"IQR {time.name}"),
        Column("speed-up"), Column(f"predicted {time.name}", rank=2), Column("error %"),
    )  # fmt: skip
    title = "measured: the median step of the traces (speed-up: ± to about 95 %; error: of the prediction)"
    return (Sheet(title, columns, tuple(rows)), *conclusions(plans, found))


def _gain_text(gain: SpeedUp | None, digits: int | None) -> str:
    if gain is None or gain.margin is None:
        return fmt.ratio(gain.factor if gain else None, digits=digits)
    return (
        f"{fmt.ratio(gain.factor, digits=digits)} ± {fmt.number(gain.margin, digits=2 if digits is None else digits)}"
    )


def conclusions(plans: Sequence[tuple[str, Plan]], found: Mapping[str, Measured]) -> tuple[Line, ...]:
    """Sentences on what was measured: what is missing, what is noise, and whether the order was predicted."""
    lines = []
    if not found:
        return ()
    if plans[0][0] not in found:
        lines.append(Line(f"no trace is of {plans[0][0]}: nothing to measure a speed-up against", "warning"))
    for name, mine in found.items():
        others = [remat for remat in mine.remat if remat != "plan"]
        if others:
            lines.append(
                Line(f"{name}: its run rematerialised by {', '.join(others)!r}, not as the plan says", "warning")
            )
    return (*lines, *_verdict(plans, found))


def _verdict(plans: Sequence[tuple[str, Plan]], found: Mapping[str, Measured]) -> tuple[Line, ...]:
    """Whether the gains are more than noise, and whether the plans ran in the order in which they were predicted."""
    base_name, baseline = plans[0]
    lines = []
    for name, plan in plans[1:]:
        gain = speed_up(plan, found[name], baseline, found.get(base_name)) if name in found else None
        if gain is not None and gain.clear is False:
            lines.append(Line(f"{name} and {base_name}: the measured difference is within the noise"))
    ran = [(name, plan) for name, plan in plans if name in found and plan.predicted]
    if len(ran) < 2:
        return tuple(lines)
    said = sorted(ran, key=lambda each: _per_sample(each[1], each[1].predicted.step_s if each[1].predicted else 0.0))
    took = sorted(ran, key=lambda each: _per_sample(each[1], found[each[0]].median_s))
    if said == took:
        lines.append(Line("the plans ran in the order that was predicted", "strong"))
    elif not any(_overtaken(before, after, found) for before, after in combinations(said, 2)):
        lines.append(Line("the plans ran in the order that was predicted, as far as the noise tells", "strong"))
    else:
        names = [", ".join(name for name, _ in each) for each in (took, said)]
        lines.append(Line(f"fastest first, they ran as {names[0]}; predicted was {names[1]}", "warning"))
    return tuple(lines)


def _per_sample(plan: Plan, step_s: float) -> float:
    return step_s / plan.workload.batch_size


def _overtaken(before: tuple[str, Plan], after: tuple[str, Plan], found: Mapping[str, Measured]) -> bool:
    """Whether the plan that was predicted to be slower ran faster, by more than noise as far as that is known."""
    gain = speed_up(after[1], found[after[0]], before[1], found[before[0]])
    return gain is not None and gain.factor > 1 and gain.clear is not False


def measured_data(plan: Plan, mine: Measured | None, baseline: Plan, base: Measured | None) -> dict[str, Any] | None:
    """The same for `--json`, of one plan; None: no trace is of it."""
    if mine is None:
        return None
    gain = speed_up(plan, mine, baseline, base)
    return {
        "traces": list(mine.traces),
        "steps_s": list(mine.steps_s),
        "median_s": mine.median_s,
        "iqr_s": mine.iqr_s,
        "remat": list(mine.remat),
        "speed_up": gain.factor if gain else None,
        "speed_up_margin": gain.margin if gain else None,
        "error": mine.error(plan),
    }
