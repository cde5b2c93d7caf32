"""What runs of the compared plans took: the median step with its spread, and what that makes of the predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.report.bootstrap import LEAST, ratio_interval
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.plan import Plan
    from assigner.trace import Trace

AS_PLANNED = "plan"
"""Rematerialisation of a run that did what its plan says."""


@dataclass(frozen=True)
class Steps:
    """The steps of all traces of one plan whose runs rematerialised alike.

    Args:
        steps_s: Seconds of each.
        traces: Their files.
        remat: What the runs did with the plan's rematerialisation: "plan", or what else a trace says.
    """

    steps_s: tuple[float, ...]
    traces: tuple[str, ...]
    remat: str = AS_PLANNED

    @property
    def planned(self) -> bool:
        """Whether the runs did what the plan says; only then its prediction is of them."""
        return self.remat == AS_PLANNED

    @cached_property
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

    def error(self, plan: Plan) -> float | None:
        """How far the plan's prediction is above (+) or below (-) the median, as a share of that.

        None: there is no prediction, or the runs did something else.
        """
        said = plan.predicted.step_s if plan.predicted and self.planned else None
        factor = fmt.against(said, self.median_s)
        return None if factor is None else factor - 1


@dataclass(frozen=True)
class Measured:
    """What was measured of one plan.

    Args:
        kinds: Runs that rematerialised alike are together; those that did what the plan says come first.
    """

    kinds: tuple[Steps, ...]

    @property
    def first(self) -> Steps:
        """What speaks for the plan."""
        return self.kinds[0]

    @property
    def traces(self) -> tuple[str, ...]:
        """The files of all runs."""
        return tuple(file for each in self.kinds for file in each.traces)


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast one plan ran as another.

    Args:
        factor: By the medians.
        interval: Between what it lies, as `ratio_interval` says; None: not known.
    """

    factor: float
    interval: tuple[float, float] | None = None

    @property
    def clear(self) -> bool | None:
        """Whether it is more than noise; None: not known."""
        return None if self.interval is None else not self.interval[0] <= 1 <= self.interval[1]


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
    return {name: _together(mine) for name, mine in found.items()}


def _together(traces: Sequence[tuple[str, Trace]]) -> Measured:
    """The traces of one plan by what their runs rematerialised: other memory and other times do not mix."""
    kinds: dict[str, list[tuple[str, Trace]]] = {}
    for file, trace in traces:
        kinds.setdefault(_remat(trace), []).append((file, trace))
    order = sorted(kinds, key=lambda remat: remat != AS_PLANNED)
    return Measured(
        tuple(
            Steps(
                tuple(step for _, trace in kinds[remat] for step in trace.step_s),
                tuple(file for file, _ in kinds[remat]),
                remat,
            )
            for remat in order
        )
    )


def _remat(trace: Trace) -> str:
    """What the run did; "never" and "always" are the plan's own where it says just that."""
    again = sum(len(stage.rematerialise) for stage in trace.stages)
    own = {0: "never", sum(len(stage.partitions) for stage in trace.stages): "always"}.get(again)
    return AS_PLANNED if trace.remat == own else trace.remat


def _unlike(trace: Trace, plan: Plan) -> list[str]:
    """In what a trace is of another plan, by `check_same_plan`'s own measure."""
    from assigner.trace import check_same_plan

    try:
        check_same_plan(trace, plan)
    except FormatError:
        names = ("workload", "stages", "schedule", "micro_batches", "micro_batch_size")
        return [name.replace("_", "-") for name in names if getattr(plan, name) != getattr(trace, name)]
    return []


def speed_up(plan: Plan, mine: Steps, baseline: Plan, base: Steps | None) -> SpeedUp | None:
    """By samples a second, so that batches may differ."""
    if base is None:
        return None
    share = plan.workload.batch_size / baseline.workload.batch_size
    interval = ratio_interval(base.steps_s, mine.steps_s)
    return SpeedUp(share * base.median_s / mine.median_s, interval and (share * interval[0], share * interval[1]))


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
    base = found[base_name].first if base_name in found else None
    runs = [(name, plan, steps) for name, plan in plans if name in found for steps in found[name].kinds]
    time = fmt.time_unit(*(steps.median_s for _, _, steps in runs))
    rows = []
    for name, plan, steps in runs:
        said = plan.predicted.step_s if plan.predicted and steps.planned else None
        rows.append(
            (
                name if steps.planned else f"{name} (remat {steps.remat})",
                fmt.count(len(steps.steps_s)),
                time.show(steps.median_s, digits=digits),
                time.show(steps.iqr_s, digits=digits),
                "baseline" if steps is base else _gain_text(speed_up(plan, steps, baseline, base), digits),
                time.show(said, digits=digits),
                fmt.points(steps.error(plan), sign=True, digits=digits),
            )
        )
    columns = (
        Column("plan", "text"), Column("steps", rank=1), Column(f"measured {time.name}"), Column(f"IQR {time.name}"),
        Column("speed-up"), Column(f"predicted {time.name}", rank=2), Column("error %"),
    )  # fmt: skip
    return (Sheet(_title(rows), columns, tuple(rows)), *conclusions(plans, found))


def _title(rows: Sequence[tuple[str, ...]]) -> str:
    """What the figures are; of the intervals only where there is one."""
    known = any("(" in row[4] for row in rows)
    about = "speed-up: in brackets its 95 % interval, as if steps were independent; " if known else ""
    return f"measured: the median step of the traces ({about}error: of the prediction)"


def _gain_text(gain: SpeedUp | None, digits: int | None) -> str:
    if gain is None or gain.interval is None:
        return fmt.ratio(gain.factor if gain else None, digits=digits)
    low, high = (fmt.number(end, digits=2 if digits is None else digits) for end in gain.interval)
    return f"{fmt.ratio(gain.factor, digits=digits)} ({low} to {high})"


def conclusions(plans: Sequence[tuple[str, Plan]], found: Mapping[str, Measured]) -> tuple[Line, ...]:
    """Sentences on what was measured: what is missing, what is noise, and whether the order was predicted."""
    lines = []
    if not found:
        return ()
    if plans[0][0] not in found:
        lines.append(Line(f"no trace is of {plans[0][0]}: nothing to measure a speed-up against", "warning"))
    for name, mine in found.items():
        others = [each.remat for each in mine.kinds if not each.planned]
        if others:
            text = f"{name}: a run rematerialised by {', '.join(others)!r}, not as the plan says"
            lines.append(Line(f"{text}; its steps stand apart, and the prediction is not of them", "warning"))
    few = [name for name, mine in found.items() if len(mine.first.steps_s) < LEAST]
    if few and len(found) > 1:
        lines.append(Line(f"fewer than {LEAST} steps of {', '.join(few)}: too few to tell a difference from noise"))
    return (*lines, *_verdict(plans, found))


def _verdict(plans: Sequence[tuple[str, Plan]], found: Mapping[str, Measured]) -> tuple[Line, ...]:
    """Whether the gains are more than noise, and whether the plans ran in the order in which they were predicted."""
    base_name, baseline = plans[0]
    lines = []
    for name, plan in plans[1:]:
        if name in found and base_name in found:
            gain = speed_up(plan, found[name].first, baseline, found[base_name].first)
            if gain is not None and gain.clear is False:
                lines.append(Line(f"{name} and {base_name}: the measured difference is within the noise"))
    ran = [
        (name, plan, found[name].first, plan.predicted.step_s)
        for name, plan in plans
        if name in found and plan.predicted and found[name].first.planned
    ]
    if len(ran) < 2:
        return tuple(lines)
    said = sorted(ran, key=lambda each: each[3] / each[1].workload.batch_size)
    took = sorted(ran, key=lambda each: each[2].median_s / each[1].workload.batch_size)
    if said == took:
        lines.append(Line("the plans ran in the order that was predicted", "strong"))
    elif not any(_overtaken(before[1:3], after[1:3]) for before, after in combinations(said, 2)):
        lines.append(Line("the plans ran in the order that was predicted, as far as the noise tells", "strong"))
    else:
        names = [", ".join(each[0] for each in order) for order in (took, said)]
        lines.append(Line(f"fastest first, they ran as {names[0]}; predicted was {names[1]}", "warning"))
    return tuple(lines)


def _overtaken(before: tuple[Plan, Steps], after: tuple[Plan, Steps]) -> bool:
    """Whether the plan that was predicted to be slower ran faster, by more than noise as far as that is known."""
    gain = speed_up(*after, *before)
    return gain is not None and gain.factor > 1 and gain.clear is not False


def measured_data(plan: Plan, mine: Measured | None, baseline: Plan, base: Measured | None) -> dict[str, Any] | None:
    """The same for `--json`, of one plan; None: no trace is of it.

    Runs that did not rematerialise as the plan says are listed in `apart`, unless there are no others.
    """
    if mine is None:
        return None
    first, *apart = (_steps_data(each, plan, baseline, base) for each in mine.kinds)
    return {**first, "apart": apart}


def _steps_data(steps: Steps, plan: Plan, baseline: Plan, base: Measured | None) -> dict[str, Any]:
    gain = speed_up(plan, steps, baseline, base.first if base else None)
    return {
        "traces": list(steps.traces),
        "steps_s": list(steps.steps_s),
        "median_s": steps.median_s,
        "iqr_s": steps.iqr_s,
        "remat": steps.remat,
        "speed_up": gain.factor if gain else None,
        "speed_up_interval": list(gain.interval) if gain and gain.interval else None,
        "error": steps.error(plan),
    }
