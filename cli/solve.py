"""`assigner solve`: from a profile to a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from assigner.errors import UsageError

from . import console, solving
from .configuration import load_configuration
from .options import Force, Json, ProfileFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.plan import Plan
    from assigner.profile import Profile
    from assigner.report.sheet import Line, Sheet
    from assigner.solver import SolveOptions

GOAL, PLAN, HINTS, SEARCH = "What is made small", "What the plan may be", "Hints", "The search"


def _option(*flags: str, panel: str, **more: Any) -> Any:
    """An option that the environment can set too, as ASSIGNER_ and its name."""
    name = flags[0].lstrip("-").replace("-", "_").upper()
    return typer.Option(*flags, envvar=f"ASSIGNER_{name}", show_envvar=False, rich_help_panel=panel, **more)


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


def _complete_baseline(incomplete: str) -> list[str]:
    from assigner.solver.baselines import TITLES

    return [name for name in TITLES if name.startswith(incomplete)]


def _check_baseline(value: str | None) -> str | None:
    if value is not None:
        from assigner.solver.baselines import TITLES

        if value not in TITLES:
            raise UsageError(f"--baseline: {value!r} is not allowed; expected {', '.join(TITLES)}")
    return value


def solve_command(
    profile: ProfileFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here (required without --json)."),
    ] = None,
    force: Force = False,
    objective: Annotated[
        Literal["step", "throughput", "latency", "cost"], _option("--objective", panel=GOAL, help="What to make small.")
    ] = "step",
    max_step: Annotated[
        float | None,
        _option("--max-step", panel=GOAL, metavar="SECONDS", help="With cost: no step that takes longer."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER=MONEY", help="Per hour, of a worker, kind or host.", rich_help_panel=GOAL),
    ] = None,
    robust: Annotated[
        bool, _option("--robust", panel=GOAL, help="Solve for the slow end of the measurements, and say how sure.")
    ] = False,
    schedule: Annotated[
        Literal["auto", "gpipe", "1f1b", "interleaved"], _option("--schedule", panel=PLAN, help="Order of the actions.")
    ] = "auto",
    micro_batches: Annotated[
        str, _option("--micro-batches", panel=PLAN, metavar="auto|N", help="Micro-batches in a step.")
    ] = "auto",
    batch_size: Annotated[
        int | None, _option("--batch-size", panel=PLAN, metavar="N", help="Samples in a step; else the profile's.")
    ] = None,
    remat: Annotated[
        Literal["auto", "never", "always"], _option("--remat", panel=PLAN, help="Rematerialise partitions.")
    ] = "auto",
    max_workers: Annotated[
        int | None, _option("--max-workers", panel=PLAN, metavar="N", help="Use no more workers than this.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=WORKER",
            autocompletion=_complete_pin,
            help="Keep a partition on a worker, kind or host.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(metavar="PART,PART", help="Keep partitions on one worker.", rich_help_panel=HINTS),
    ] = None,
    apart: Annotated[
        list[str] | None,
        typer.Option(metavar="PART,PART", help="Keep partitions on different workers.", rich_help_panel=HINTS),
    ] = None,
    never_remat: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Never run its forward twice.", rich_help_panel=HINTS),
    ] = None,
    always_remat: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Always rematerialise it.", rich_help_panel=HINTS),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER", help="Use only these workers, kinds or hosts.", rich_help_panel=HINTS),
    ] = None,
    order: Annotated[
        str | None,
        _option("--order", panel=HINTS, metavar="WORKER,...", help="Stages follow these workers, or `ranks`."),
    ] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER=SIZE", help="Memory to leave free, as 2GiB.", rich_help_panel=HINTS),
    ] = None,
    complete: Annotated[
        Path | None,
        _option("--complete", panel=HINTS, metavar="PLAN", help="Keep what this partial plan says, place the rest."),
    ] = None,
    config: Annotated[  # noqa: ARG001 - its callback answers
        Path | None,
        typer.Option(
            metavar="TOML",
            callback=load_configuration,
            is_eager=True,
            envvar="ASSIGNER_CONFIG",
            show_envvar=False,
            help="Take settings from its \\[solve] table.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    solver: Annotated[Literal["highs", "cbc"], _option("--solver", panel=SEARCH, help="The ILP solver.")] = "highs",
    gap: Annotated[float, _option("--gap", panel=SEARCH, help="Stop within this share of the best possible.")] = 0.01,
    time_limit: Annotated[
        float, _option("--time-limit", panel=SEARCH, metavar="SECONDS", help="Stop with the best plan found.")
    ] = 60.0,
    seed: Annotated[int, _option("--seed", panel=SEARCH, help="Of the solver.")] = 0,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=_check_baseline,
            autocompletion=_complete_baseline,
            help="Write this simple placement as the plan instead.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place the partitions of a profile: the best plan, proven.

    Names of partitions may be patterns: --pin 'block.*=host1'. Settings may come from the environment
    (ASSIGNER_SOLVER=cbc) and from a TOML file; a flag counts for more.
    """
    from assigner.document import refuse_existing
    from assigner.plan import load_plan
    from assigner.profile import load_profile
    from assigner.report.plan import plan_report
    from assigner.solver import SolveOptions, completing, solve_baseline

    if output is None and not as_json:
        raise UsageError("no output is named", hint="-o plan.json writes the plan; --json prints it")
    if output is not None:
        refuse_existing(output, force=force)
    rules: dict[str, Literal["never", "always"]] = dict.fromkeys(never_remat or [], "never")
    for name in always_remat or []:
        if rules.setdefault(name, "always") != "always":
            raise UsageError(f"--always-remat: {name!r} is in --never-remat, too")
    options = SolveOptions(
        objective=objective, schedule=schedule, micro_batches=solving.micro_batches(micro_batches), remat=remat,
        max_step_s=max_step, max_workers=max_workers, batch_size=batch_size,
        pins=solving.pairs(pin or [], flag="--pin", example="embed=worker:0"),
        together=solving.groups(together or []), apart=solving.groups(apart or []),
        only=tuple(only or []), order=solving.names(order or ""), rematerialise=rules,
        reserve={
            name: solving.size(text, flag="--reserve")
            for name, text in solving.pairs(reserve or [], flag="--reserve", example="worker:0=2GiB").items()
        },
        solver=solver, gap=gap, time_limit=time_limit, seed=seed,
    )  # fmt: skip
    prices = solving.pairs(price or [], flag="--price", example="worker:0=2.5")
    loaded = solving.priced(load_profile(profile), prices)
    if complete is not None:
        options = completing(options, load_plan(complete), loaded)
    if baseline is not None:
        plan = _sign(solve_baseline(loaded, baseline, options), profile)
        _hand_over(plan, plan_report(plan), output, force=force, as_json=as_json)
        return
    plan, report = _solve(loaded, options, robust=robust)
    _hand_over(_sign(plan, profile), report, output, force=force, as_json=as_json)


def _solve(profile: "Profile", options: "SolveOptions", *, robust: bool) -> "tuple[Plan, tuple[Sheet | Line, ...]]":
    """The plan and what there is to say of it."""
    import time

    from assigner.report.robustness import draws_text, robustness_report
    from assigner.report.solution import solution_report
    from assigner.solver import solve
    from assigner.solver.robust.robustness import solve_robust

    from .progress import SolveProgress

    def drawn(done: int, asked: int) -> None:
        began.append(time.monotonic())
        progress.say(draws_text(done, asked, elapsed_s=began[-1] - began[0], time_limit=options.time_limit))

    began: list[float] = []
    with SolveProgress(time_limit=options.time_limit) as progress:
        if not robust:
            solution = solve(profile, options, progress=progress.update)
            return solution.plan, solution_report(solution)
        solution, found = solve_robust(profile, options, progress=progress.update, draws_progress=drawn)
    return solution.plan, (*solution_report(solution), *robustness_report(found))


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


def _sign(plan: "Plan", profile: Path) -> "Plan":
    """The plan saying where it comes from."""
    import hashlib
    from dataclasses import replace
    from datetime import UTC, datetime

    from assigner import __version__
    from assigner.plan import ProfileReference

    return replace(
        plan,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tool_version=__version__,
        profile=ProfileReference(str(profile), hashlib.sha256(profile.read_bytes()).hexdigest()),
    )
