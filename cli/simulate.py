"""`assigner simulate`: a plan priced anew from a profile, alone or beside a trace of its run."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assigner.errors import MeasurementError, UsageError
from assigner.settings import whole_number

from . import console
from .options import Force, Json, PlanFile, PricingProfile

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.trace import Trace
    from assigner.schedule.cost import CostModel
    from assigner.schedule.simulate import Timeline
    from assigner.validation.spans import Spans

_VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def simulate_command(
    plan: PlanFile,
    *,
    profile: PricingProfile = None,
    memory: Annotated[bool, typer.Option("--memory", help="Memory over time; with --json every moment.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Predicted and measured, from a run's trace.")
    ] = None,
    step: Annotated[
        str, typer.Option(metavar="N", help="With --against: which step to draw: its number, median, or all.")
    ] = "median",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline for Perfetto; packed where it ends in .gz.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="OUT", help="With --against: write a corrected profile.")
    ] = None,
    force_busy: Annotated[
        bool,
        typer.Option("--force-busy", help="With --calibrate: from a trace of a machine that others kept busy, too."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Draw and price a plan's step, alone or against its run."""
    _check(memory=memory, against=against, step=step, calibrate=calibrate)
    from assigner.files import refuse_existing
    from assigner.formats.plan import load_plan, profile_path
    from assigner.formats.profile import load_profile
    from assigner.formats.trace import load_trace
    from assigner.schedule.cost import CostModel

    found = load_plan(plan)
    known = profile_path(found, plan, profile)
    refuse_existing(trace, force=force, reads=[plan, known, against])
    refuse_existing(calibrate, force=force, reads=[plan, against])
    cost = CostModel(load_profile(known))
    if against is None:
        sides, timeline = _predict(found, cost, known, memory=memory, as_json=as_json)
    else:
        measured = load_trace(against)
        if calibrate is not None and not force_busy:
            _check_quiet(measured, against)
        sides, timeline = _compare(
            found, cost, measured, against, step=step, out=calibrate, force=force, as_json=as_json
        )
    if trace is not None:
        _draw(
            trace,
            sides,
            timeline,
            cost,
            [str(each) for each in (plan, known, against) if each is not None],
            force=force,
        )


def _check(*, memory: bool, against: Path | None, step: str, calibrate: Path | None) -> None:
    """Flags that do not go together."""
    if against is not None and memory:
        raise UsageError("--memory and --against are both given", hint="choose one of them")
    if against is None and calibrate is not None:
        raise UsageError("--calibrate needs a trace to learn from", hint="--against TRACE")
    if against is None and step != "median":
        raise UsageError(f"--step {step} is of a measured run, and there is none", hint="--against TRACE")
    if step not in ("median", "all") and whole_number(step) is None:
        raise UsageError(f"--step: {step!r} is not allowed", hint="a step's number from 0, median, or all")


def _check_quiet(trace: "Trace", path: Path) -> None:
    """A run that others starved would make a profile worse."""
    from assigner.machine.starvation import REFUSED

    worst = max(trace.workers, key=lambda worker: worker.starved)
    if worst.starved >= REFUSED:
        raise MeasurementError(
            f"{path}: other programs had {100 * worst.starved:.0f} % of the processor time of {worst.worker} while it"
            " was traced: a profile that is corrected by it would be wrong",
            hint="trace the run on a quiet machine; --force-busy takes it all the same",
        )


def _predict(
    plan: "Plan", cost: "CostModel", profile: Path, *, memory: bool, as_json: bool
) -> "tuple[list[Spans], Timeline]":
    """What the profile says of the plan."""
    from assigner.formats.plan import is_origin
    from assigner.report.prediction import prediction_data, prediction_report
    from assigner.schedule.occupancy import memory_over_time
    from assigner.schedule.simulate import check_step, simulated, summary
    from assigner.validation.spans import predicted_spans

    timeline = simulated(plan, cost)
    now, spans = summary(timeline, cost), predicted_spans(timeline, cost)
    check_step(replace(plan, predicted=now), cost.profile)
    held = memory_over_time(timeline, cost) if memory else None
    own = is_origin(plan, profile)
    if as_json:
        console.show_json(prediction_data(plan, now, spans, held, own_profile=own))
    else:
        width = console.stdout().width
        console.show(prediction_report(plan, cost.profile, now, spans, held, own_profile=own, width=width))
    return [spans], timeline


def _compare(
    plan: "Plan", cost: "CostModel", trace: "Trace", path: Path, *, step: str, out: Path | None, force: bool,
    as_json: bool,
) -> "tuple[list[Spans], Timeline]":  # fmt: skip
    """Predicted beside measured, and the profile that follows from it."""
    from assigner.report.agreement import agreement_data, agreement_report
    from assigner.schedule.simulate import simulated
    from assigner.validation.comparison import agree
    from assigner.validation.spans import predicted_spans

    found = agree(plan, cost.profile, trace)
    timeline, measured = simulated(found.plan, cost), _measured(trace, plan, step)
    sides = [predicted_spans(timeline, cost, steps=len(measured.steps)), measured]
    if as_json:
        console.show_json(agreement_data(found, sides))
    else:
        console.show(agreement_report(found, sides, cost.profile, width=console.stdout().width))
    if out is not None:
        _calibrate(found, cost, path, out, force=force)
    return sides, timeline


def _measured(trace: "Trace", plan: "Plan", step: str) -> "Spans":
    from assigner.validation.spans import measured_spans, median_step

    if step == "all":
        return measured_spans(trace, plan)
    return measured_spans(trace, plan, step=median_step(trace) if step == "median" else int(step))


def _calibrate(found: Any, cost: "CostModel", trace: Path, out: Path, *, force: bool) -> None:
    """Write the profile that the trace corrects."""
    from assigner import formatting as fmt
    from assigner.formats.profile import save_profile
    from assigner.schedule.cost import CostModel
    from assigner.schedule.simulate import step_s
    from assigner.validation.calibration import calibrated

    corrected = calibrated(cost.profile, found, trace=trace.name)
    save_profile(corrected, out, force=force)
    now, took = step_s(found.plan, CostModel(corrected)), found.step.measured_s
    told = f"wrote {out}: it predicts {fmt.seconds(now)} for this plan, {fmt.seconds(took)} were measured"
    console.notice(told)
    if abs(now - took) > abs(found.step.predicted_s - took):
        console.notice(
            f"warning: that is further off than {fmt.seconds(found.step.predicted_s)}, as before: the single actions do"
            " not add up to the step here; trace more steps, on quiet workers"
        )


def _draw(
    out: Path, sides: "list[Spans]", timeline: "Timeline", cost: "CostModel", files: list[str], *, force: bool
) -> None:
    """Write the timeline for a trace viewer."""
    from assigner import formatting as fmt
    from assigner.export.traceevents import save_trace_events, trace_events
    from assigner.schedule.occupancy import memory_over_time

    plan = timeline.program.plan
    about = dict(zip(("plan", "profile", "trace"), files, strict=False)) | {
        "workload": plan.workload.name, "schedule": plan.schedule, "micro_batches": plan.micro_batches,
    }  # fmt: skip
    capacity = {worker: cost.profile.worker[worker].capacity_bytes for worker in plan.workers}
    made = trace_events(sides, memory_over_time(timeline, cost), capacity=capacity, about=about)
    size = save_trace_events(made, out, force=force)
    console.notice(f"wrote {out} ({fmt.size(size)}): open it in {_VIEWERS}")
