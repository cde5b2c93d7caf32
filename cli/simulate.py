"""`assigner simulate`: a plan priced anew from a profile, alone or beside a trace of its run."""

from pathlib import Path
from typing import Annotated

import typer

from assigner.errors import UsageError

from . import console
from .options import Force, Json, PlanFile


def simulate_command(
    plan: PlanFile,
    *,
    profile: Annotated[
        Path,
        typer.Option("--profile", metavar="PROFILE", help="The measurements to price it with.", show_default=False),
    ],
    memory: Annotated[bool, typer.Option("--memory", help="Memory over time; with --json every moment.")] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="TRACE", help="Predicted and measured, from a run's trace."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="OUT", help="With --against: write a corrected profile."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Price a plan with a profile, or against its run."""
    if against is not None:
        if memory:
            raise UsageError("--memory and --against are both given", hint="choose one of them")
        _compare(plan, profile, against, calibrate, force=force, as_json=as_json)
        return
    if calibrate is not None:
        raise UsageError("--calibrate needs a trace to learn from", hint="--against TRACE")
    from assigner.cost import CostModel
    from assigner.occupancy import memory_over_time
    from assigner.plan import load_plan
    from assigner.profile import load_profile
    from assigner.report.prediction import prediction_data, prediction_report
    from assigner.simulate import simulated, summary

    found, cost = load_plan(plan), CostModel(load_profile(profile))
    timeline = simulated(found, cost)
    now = summary(timeline, cost)
    held = memory_over_time(timeline, cost) if memory else None
    if as_json:
        console.show_json(prediction_data(found, now, held))
    else:
        console.show(prediction_report(found, now, held))


def _compare(plan: Path, profile: Path, trace: Path, out: Path | None, *, force: bool, as_json: bool) -> None:
    """Predicted beside measured, and the profile that follows from it."""
    from assigner import formatting as fmt
    from assigner.agreement import agree, calibrated
    from assigner.cost import CostModel
    from assigner.document import refuse_existing
    from assigner.plan import load_plan
    from assigner.profile import load_profile, save_profile
    from assigner.report.agreement import agreement_data, agreement_report
    from assigner.simulate import step_s
    from assigner.trace import load_trace

    if out is not None:
        refuse_existing(out, force=force)
    known = load_profile(profile)
    found = agree(load_plan(plan), known, load_trace(trace))
    if as_json:
        console.show_json(agreement_data(found))
    else:
        console.show(agreement_report(found))
    if out is not None:
        corrected = calibrated(known, found, trace=trace.name)
        save_profile(corrected, out, force=force)
        now, took = fmt.seconds(step_s(found.plan, CostModel(corrected))), fmt.seconds(found.step.measured_s)
        console.notice(f"wrote {out}: it predicts {now} for this plan, {took} were measured")
