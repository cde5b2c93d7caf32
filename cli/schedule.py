"""`assigner schedule`: the order in which every worker of a plan works; another one in its place."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import FormatError, UsageError

from . import console
from .options import Force, Json, PlanFile, PricingProfile, written

if TYPE_CHECKING:
    from assigner.formats.plan import Plan


def schedule_command(
    plan: PlanFile,
    *,
    orders: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='These in place of the plan\'s, if they can run: JSON, {"WORKER": "0F0 0B0 ..."}, or the CSV of'
            " torch.distributed.pipelining, a row for each worker.",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="The plan's own order, written out, to be edited.")] = False,
    output: Annotated[Path | None, written("NEW", help="Write the plan with that order.")] = None,
    profile: PricingProfile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show a plan's order of work, or give it another one."""
    if orders is not None and listed:
        raise UsageError("--orders and --list are both given", hint="choose one of them")
    if output is not None and orders is None and not listed:
        raise UsageError("--output needs an order to write", hint="--orders FILE, or --list")
    from assigner.files import refuse_existing
    from assigner.formats.plan import is_origin, load_plan, profile_path, reference, save_plan
    from assigner.formats.profile import load_profile
    from assigner.report.prediction import order_data, order_report
    from assigner.schedule import orders as rules
    from assigner.schedule.cost import CostModel
    from assigner.schedule.simulate import simulated, summary
    from assigner.validation.spans import predicted_spans

    found = load_plan(plan)
    where = profile_path(found, plan, profile)
    refuse_existing(output, force=force, reads=[plan, where, orders])
    known = load_profile(where)
    if orders is not None:
        found = _with_orders(found, orders)
    elif listed:
        found = rules.listed(found)
    cost = CostModel(known)
    timeline = simulated(found, cost)
    now = summary(timeline, cost)
    if as_json:
        console.show_json(order_data(found, known, now))
    else:
        spans, every = predicted_spans(timeline, cost), console.settings().verbose
        console.show(order_report(found, known, now, spans, width=console.stdout().width, everything=every))
    if output is not None:  # what the solver said is of another order
        written = replace(found, predicted=now, solver=None, candidates=(), what_if=())
        if not is_origin(found, where):
            written = replace(written, profile=reference(where), baselines=())
        save_plan(written, output, force=force)
        console.notice(f"wrote {output}")


def _with_orders(plan: "Plan", path: Path) -> "Plan":
    """The plan with the orders of a file."""
    from assigner.formats.orders import load_orders

    stages = tuple(replace(stage, in_flight=None) for stage in plan.stages)
    listing = load_orders(path, plan.workers)
    try:
        return replace(plan, schedule="listed", orders=listing, stages=stages)
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
