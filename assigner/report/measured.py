"""What runs took: the median step with its spread, and what that makes of the predictions."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.trace import check_same_plan
from assigner.report.agreement import missed_by, step_text
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.samples import Samples
from assigner.validation.comparison import Compared
from assigner.validation.steps import LEAST, PlanRuns, SpeedUp, Steps, overtaken, speed_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.launch.steptimes import StepTimes

FAR = 0.15
"""A prediction that misses the median by more, as a share of it, is not what docs/predictions.md lets one expect."""


def measured(plans: Sequence[tuple[str, Plan]], found: Mapping[str, PlanRuns], *, digits: int | None = None) -> Report:
    """The table of what `runs_by_plan` found, and sentences on what it means; the first plan is the baseline."""
    if not found:
        return ()
    base_name, baseline = plans[0]
    base = found[base_name][0] if base_name in found else None
    runs = [(name, plan, steps) for name, plan in plans if name in found for steps in found[name]]
    time = fmt.time_unit(*(steps.median_s for _, _, steps in runs))
    rows, has_interval = [], False
    for name, plan, steps in runs:
        said = plan.predicted_step_s if steps.planned else None
        gain = "baseline" if steps is base else _gain_text(speed_up(plan, steps, baseline, base), digits)
        has_interval = has_interval or "(" in gain
        rows.append(
            (
                (Column("plan", "text"), name if steps.planned else f"{name} (remat {steps.remat})"),
                (Column("steps", rank=1), fmt.count(len(steps.seconds))),
                (Column(f"measured {time.name}"), time.show(steps.median_s, digits=digits)),
                (Column(f"IQR {time.name}"), time.show(steps.iqr_s, digits=digits)),
                (Column("speed-up"), gain),
                (Column(f"predicted {time.name}", rank=2), time.show(said, digits=digits)),
                (Column("error %"), fmt.points(steps.error(plan), sign=True, digits=digits)),
            )
        )
    about = "speed-up: in brackets its 95 % interval, as if steps were independent; " if has_interval else ""
    held = "a run's last 20, unless it asked for another number"
    title = f"measured: the median of the steps in the traces ({held}; {about}error: of the prediction)"
    return (Sheet.of(title, rows), *conclusions(plans, found))


def _gain_text(gain: SpeedUp | None, digits: int | None) -> str:
    if gain is None or gain.interval is None:
        return fmt.ratio(gain.factor if gain else None, digits=digits)
    low, high = (fmt.number(end, digits=2 if digits is None else digits) for end in gain.interval)
    return f"{fmt.ratio(gain.factor, digits=digits)} ({low} to {high})"


def conclusions(plans: Sequence[tuple[str, Plan]], found: Mapping[str, PlanRuns]) -> tuple[Line, ...]:
    """Sentences on what was measured: what is missing, what is noise, and whether the order was predicted."""
    lines = []
    if not found:
        return ()
    if plans[0][0] not in found:
        lines.append(Line(f"no trace is of {plans[0][0]}: nothing to measure a speed-up against", "warning"))
    for name, mine in found.items():
        others = [each.remat for each in mine if not each.planned]
        if others:
            text = f"{name}: a run rematerialised by {', '.join(others)!r}, not as the plan says"
            lines.append(Line(f"{text}; its steps stand apart, and the prediction is not of them", "warning"))
        lines += [Line(f"{name}: {each.busy}; its steps took longer", "warning") for each in mine if each.busy]
    lines += [line for name, plan in plans if name in found for line in _missed(name, plan, found[name][0])]
    few = [name for name, mine in found.items() if len(mine[0].seconds) < LEAST]
    if few and len(found) > 1:
        lines.append(Line(f"fewer than {LEAST} steps of {', '.join(few)}: too few to tell a difference from noise"))
    return (*lines, *_verdict(plans, found))


def _missed(name: str, plan: Plan, steps: Steps) -> tuple[Line, ...]:
    """A prediction that is far from what was measured, and who says why."""
    error = steps.error(plan)
    if error is None or abs(error) <= FAR:
        return ()
    told = f"{name}: the prediction is {missed_by(error)}: simulate --against TRACE says where that comes from"
    return (Line(told, "warning"),)


def _verdict(plans: Sequence[tuple[str, Plan]], found: Mapping[str, PlanRuns]) -> tuple[Line, ...]:
    """Whether the gains are more than noise, and whether the plans ran in the order in which they were predicted."""
    base_name, baseline = plans[0]
    lines = []
    for name, plan in plans[1:]:
        if name in found and base_name in found:
            gain = speed_up(plan, found[name][0], baseline, found[base_name][0])
            if gain is not None and gain.clear is False:
                lines.append(Line(f"{name} and {base_name}: the measured difference is within the noise"))
    ran = [
        (name, plan, found[name][0], plan.predicted.step_s)
        for name, plan in plans
        if name in found and plan.predicted and found[name][0].planned
    ]
    if len(ran) < 2:
        return tuple(lines)
    said = sorted(ran, key=lambda each: each[3] / each[1].workload.batch_size)
    took = sorted(ran, key=lambda each: each[2].median_s / each[1].workload.batch_size)
    if said != took and any(overtaken(before[1:3], after[1:3]) for before, after in combinations(said, 2)):
        names = [", ".join(each[0] for each in order) for order in (took, said)]
        lines.append(Line(f"fastest first, they ran as {names[0]}; predicted was {names[1]}", "warning"))
        return tuple(lines)
    gains = (speed_up(*faster[1:3], *slower[1:3]) for faster, slower in pairwise(took))
    noisy = said != took or any(gain is not None and gain.clear is False for gain in gains)
    so_far = ", as far as the noise tells" if noisy else ""
    lines.append(Line(f"the plans ran in the order that was predicted{so_far}", "strong"))
    return tuple(lines)


def measured_data(plan: Plan, mine: PlanRuns | None, baseline: Plan, base: PlanRuns | None) -> dict[str, Any] | None:
    """The same for `--json`, of one plan; None: no trace is of it.

    Runs that did not rematerialise as the plan says are listed in `apart`, unless there are no others.
    """
    if mine is None:
        return None
    first, *apart = (_steps_data(each, plan, baseline, base) for each in mine)
    return {**first, "apart": apart}


def _steps_data(steps: Steps, plan: Plan, baseline: Plan, base: PlanRuns | None) -> dict[str, Any]:
    gain = speed_up(plan, steps, baseline, base[0] if base else None)
    return {
        "traces": list(steps.traces),
        "steps_s": list(steps.seconds),
        "median_s": steps.median_s,
        "iqr_s": steps.iqr_s,
        "remat": steps.remat,
        "speed_up": gain.factor if gain else None,
        "speed_up_interval": list(gain.interval) if gain and gain.interval else None,
        "error": steps.error(plan),
    }


def step_times_text(found: StepTimes, plan: Plan) -> str:
    """A run's step beside its plan's prediction, in one line: what `assigner run` says at its end.

    A plan whose prediction does not hold has none here.
    """
    if not found.seconds:
        return f"step: none to hold against the prediction: {_other_steps(found)}"
    took = Samples(found.seconds)
    if plan.predicted is not None and (why := _other_run(found, plan)) is None:
        return step_text(Compared(plan.predicted.step_s, took.median_s, took.iqr_s, len(took.seconds)))
    measured = f"{fmt.seconds(took.median_s)} measured (median of {fmt.plural(len(took.seconds), 'step')})"
    return f"step: {measured}; {'the plan has no prediction' if plan.predicted is None else why}"


def _other_steps(found: StepTimes) -> str:
    """What steps were that are not one whole program of the plan."""
    parts = []
    if found.gathered:
        steps = fmt.plural(found.gathered, "step")
        if found.updated or found.changed:
            parts.append(f"{steps} left the update to the script (update=False)")
        elif found.changed is None:
            parts.append(f"{steps} added to the gradients (update=False), and no pipeline.optimizer.step() followed")
        else:
            parts.append(
                f"{steps} added to the gradients (update=False), and no update followed: the weights are as they were;"
                " pipeline.optimizer.step() updates them"
            )
    if found.others:
        parts.append(f"{fmt.plural(found.others, 'step')} had other micro-batches than the plan")
    return "; ".join(parts)


def _other_run(found: StepTimes, plan: Plan) -> str | None:
    """Why a plan's prediction is not of these steps; None: it is."""
    if found.remat != "plan":
        return f"the run rematerialised by {found.remat!r}, not as the plan says: its prediction is of another run"
    try:
        check_same_plan(found.plan, plan)
    except FormatError:
        return "the script ran another plan than it was started with, whose prediction says nothing of this one"
    return None
