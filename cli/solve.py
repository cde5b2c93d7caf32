"""`assigner solve`: from a profile to a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from assigner.errors import UsageError

from . import console
from .options import Force, Json, ProfileFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.plan import Plan
    from assigner.report.sheet import Line, Sheet

SETTINGS, SEARCH = "What the plan may be", "The search"


def _complete_pin(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions up to the `=`, workers behind it, from the profile that is already on the line."""
    from assigner.errors import AssignerError
    from assigner.profile import load_profile

    try:
        profile = load_profile(Path(ctx.params.get("profile") or ""))
    except AssignerError:
        return []
    partition, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{partition}={worker}" for worker in profile.worker]
    return [f"{name}=" for name in profile.order]


def solve_command(
    profile: ProfileFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here (required without --json)."),
    ] = None,
    force: Force = False,
    micro_batches: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            envvar="ASSIGNER_MICRO_BATCHES",
            show_envvar=False,
            help="Micro-batches in a step.",
            rich_help_panel=SETTINGS,
        ),
    ] = "auto",
    remat: Annotated[
        Literal["auto", "never", "always"],
        typer.Option(
            envvar="ASSIGNER_REMAT", show_envvar=False, help="Rematerialise partitions.", rich_help_panel=SETTINGS
        ),
    ] = "auto",
    schedule: Annotated[
        Literal["auto", "gpipe"],
        typer.Option(
            envvar="ASSIGNER_SCHEDULE", show_envvar=False, help="Order of the actions.", rich_help_panel=SETTINGS
        ),
    ] = "auto",
    objective: Annotated[
        Literal["step"],
        typer.Option(
            envvar="ASSIGNER_OBJECTIVE", show_envvar=False, help="What to make small.", rich_help_panel=SETTINGS
        ),
    ] = "step",
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=WORKER",
            autocompletion=_complete_pin,
            help="Keep a partition on a worker, kind or host; may be repeated.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    solver: Annotated[
        Literal["highs", "cbc"],
        typer.Option(envvar="ASSIGNER_SOLVER", show_envvar=False, help="The ILP solver.", rich_help_panel=SEARCH),
    ] = "highs",
    gap: Annotated[
        float,
        typer.Option(
            envvar="ASSIGNER_GAP",
            show_envvar=False,
            help="Stop within this share of the best possible.",
            rich_help_panel=SEARCH,
        ),
    ] = 0.01,
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            envvar="ASSIGNER_TIME_LIMIT",
            show_envvar=False,
            help="Stop with the best plan found.",
            rich_help_panel=SEARCH,
        ),
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(envvar="ASSIGNER_SEED", show_envvar=False, help="Of the solver.", rich_help_panel=SEARCH)
    ] = 0,
    baseline: Annotated[
        Literal["single", "equal", "proportional", "balance"] | None,
        typer.Option(help="Write this simple placement as the plan instead.", rich_help_panel=SEARCH),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place the partitions of a profile: the fastest plan.

    The settings may come from the environment: ASSIGNER_SOLVER=cbc, ASSIGNER_TIME_LIMIT=10. A flag counts for more.
    """
    from dataclasses import replace

    from assigner.document import refuse_existing
    from assigner.profile import load_profile
    from assigner.report.plan import plan_report
    from assigner.report.solution import solution_report
    from assigner.solver import SolveOptions, solve, solve_baseline

    from .progress import SolveProgress

    if output is None and not as_json:
        raise UsageError("no output is named", hint="-o plan.json writes the plan; --json prints it")
    if output is not None:
        refuse_existing(output, force=force)
    options = SolveOptions(
        micro_batches=_micro_batches(micro_batches), remat=remat, solver=solver, gap=gap, time_limit=time_limit,
        seed=seed, pins=_pins(pin or []),
    )  # fmt: skip
    loaded = load_profile(profile)
    if baseline is not None:
        plan = _sign(solve_baseline(loaded, baseline, options), profile)
        _hand_over(plan, plan_report(plan), output, force=force, as_json=as_json)
        return
    with SolveProgress(time_limit=time_limit) as progress:
        solution = solve(loaded, options, progress=progress.update)
    plan = _sign(solution.plan, profile, {"schedule": schedule, "objective": objective})
    report = solution_report(replace(solution, plan=plan))
    _hand_over(plan, report, output, force=force, as_json=as_json)


def _hand_over(
    plan: "Plan", report: "Iterable[Sheet | Line]", output: Path | None, *, force: bool, as_json: bool
) -> None:
    """Write the plan's file, and show its report or the plan itself."""
    from assigner.document import encode
    from assigner.plan import save_plan

    if output is not None:
        save_plan(plan, output, force=force)
    if as_json:
        console.show_json(encode(plan))
    elif not console.settings().quiet:
        console.show(report)
    if output is not None:
        console.notice(f"wrote {output}")


def _micro_batches(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--micro-batches: {text!r} is not allowed; expected auto or a whole number, 1 or more")
    return int(text)


def _pins(texts: list[str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for text in texts:
        partition, equals, worker = text.partition("=")
        if not (partition and equals and worker):
            raise UsageError(f"--pin: {text!r} is not allowed; expected PART=WORKER", hint="--pin embed=worker:0")
        if pins.setdefault(partition, worker) != worker:
            raise UsageError(f"--pin: {partition!r} is pinned to {pins[partition]!r} and to {worker!r}")
    return pins


def _sign(plan: "Plan", profile: Path, settings: dict[str, Any] | None = None) -> "Plan":
    """The plan saying where it comes from."""
    import hashlib
    from dataclasses import replace
    from datetime import UTC, datetime

    from assigner import __version__
    from assigner.plan import ProfileReference

    report = plan.solver
    return replace(
        plan,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tool_version=__version__,
        profile=ProfileReference(str(profile), hashlib.sha256(profile.read_bytes()).hexdigest()),
        solver=report and replace(report, options={**report.options, **(settings or {})}),
    )
