"""`assigner solve`: from a profile to a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from assigner.errors import UsageError

from . import console, names, solving
from .configuration import settings_file
from .options import Config, Force, Json, ProfileFile

if TYPE_CHECKING:
    from assigner.plan import Plan
    from assigner.profile import Profile
    from assigner.solver import Solution, SolveOptions
    from assigner.solver.robust.robustness import Robustness

GOAL, PLAN, HINTS, SEARCH = "What is made small", "What the plan may be", "Hints", "The search"


def _option(*flags: str, panel: str, **more: Any) -> Any:
    """An option that the environment can set too, as ASSIGNER_ and its name."""
    name = flags[0].partition("/")[0].lstrip("-").replace("-", "_").upper()
    return typer.Option(*flags, envvar=f"ASSIGNER_{name}", show_envvar=False, rich_help_panel=panel, **more)


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
        typer.Option(
            metavar="WORKER=MONEY", autocompletion=names.amounts, help="Per hour, of a worker, kind or host.",
            rich_help_panel=GOAL,
        ),
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
            autocompletion=names.pins,
            help="Keep a partition on a worker, kind or host.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=WORKER", autocompletion=names.pins, help="Keep a partition off a worker, kind or host.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART,PART", autocompletion=names.partitions, help="Keep partitions on one worker.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    apart: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART,PART", autocompletion=names.partitions, help="Keep partitions on different workers.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    never_remat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", autocompletion=names.partitions, help="Never run its forward twice.", rich_help_panel=HINTS
        ),
    ] = None,
    always_remat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", autocompletion=names.partitions, help="Always rematerialise it.", rich_help_panel=HINTS
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER", autocompletion=names.workers, help="Use only these workers, kinds or hosts.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    order: Annotated[
        str | None,
        _option(
            "--order", panel=HINTS, metavar="WORKER,...", autocompletion=names.workers,
            help="Stages follow these workers, or `ranks`.",
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER=SIZE", autocompletion=names.amounts, help="Hold no more than this there, as 2GiB.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER=SIZE", autocompletion=names.amounts, help="Leave this free, not the profile's reserve.",
            rich_help_panel=HINTS,
        ),
    ] = None,
    complete: Annotated[
        Path | None,
        _option("--complete", panel=HINTS, metavar="PLAN", help="Keep what this partial plan says, place the rest."),
    ] = None,
    config: Config = None,
    solver: Annotated[Literal["highs", "cbc"], _option("--solver", panel=SEARCH, help="The ILP solver.")] = "highs",
    gap: Annotated[float, _option("--gap", panel=SEARCH, help="Stop when optimal to within this share.")] = 0.01,
    time_limit: Annotated[
        float, _option("--time-limit", panel=SEARCH, metavar="SECONDS", help="Stop with the best plan found.")
    ] = 60.0,
    seed: Annotated[int, _option("--seed", panel=SEARCH, help="Of the solver.")] = 0,
    what_if: Annotated[
        bool | None,
        _option(
            "--what-if/--no-what-if", panel=SEARCH, show_default=False,
            help="Price more micro-batches, one more worker, a wider wire.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=_check_baseline,
            autocompletion=_complete_baseline,
            help="Write this simple placement as the plan instead: single, equal, proportional, balance, pipedream,"
            " greedy or weighted.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Place the partitions of a profile: the best plan, proven.

    Names of partitions may be patterns: --pin 'block.*=host1'. Settings may come from the environment
    (ASSIGNER_SOLVER=cbc) and from a TOML file; a flag counts for more.
    """
    from dataclasses import replace

    from assigner.files import refuse_existing
    from assigner.plan import load_plan, save_plan
    from assigner.profile import load_profile
    from assigner.solver import SolveOptions, completing

    if output is None and not as_json:
        raise UsageError("no output is named", hint="-o plan.json writes the plan; --json prints it")
    if output is not None:
        refuse_existing(output, force=force, reads=[profile, complete, settings_file(config)])
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
        forbid=solving.pair_list(forbid or [], flag="--forbid", example="embed=worker:0"),
        memory=solving.sizes(memory or [], flag="--memory"), reserve=solving.sizes(reserve or [], flag="--reserve"),
        prices={
            name: solving.money(text, flag="--price")
            for name, text in solving.pairs(price or [], flag="--price", example="worker:0=2.5").items()
        },
        solver=solver, gap=gap, time_limit=time_limit, seed=seed,
    )  # fmt: skip
    if what_if and (robust or baseline is not None or objective != "step"):
        raise UsageError("--what-if goes with a search for the step time", hint="leave out one of the two")
    loaded = load_profile(profile)
    for line in solving.unlinked(loaded, options.only):
        console.notice(line)
    if complete is not None:
        options = completing(options, load_plan(complete), loaded)
    solution, robustness = _solved(loaded, options, baseline=baseline, robust=robust, what_if=what_if)
    solution = replace(solution, plan=_sign(solution.plan, profile))
    if output is not None:
        save_plan(solution.plan, output, force=force)
    _show(solution, loaded, robustness, as_json=as_json)
    if output is not None:
        console.notice(f"wrote {output}")


def _solved(
    profile: "Profile", options: "SolveOptions", *, baseline: str | None, robust: bool, what_if: bool | None
) -> "tuple[Solution, Robustness | None]":
    """The plan with what else was found, and how it holds up where that was asked for."""
    from assigner.solver import Solution, price_what_ifs, solve, solve_baseline, what_ifs_are_cheap

    from .progress import SolveProgress

    if baseline is not None:
        return Solution(solve_baseline(profile, baseline, options)), None
    with SolveProgress(time_limit=options.time_limit) as progress:
        if robust:
            from assigner.solver.robust.robustness import solve_robust

            return solve_robust(profile, options, progress=progress.update, draws_progress=progress.draws)
        solution = solve(profile, options, progress=progress.update)
        wanted = what_ifs_are_cheap(profile, options) if what_if is None else what_if
        if wanted:
            solution = price_what_ifs(solution, profile, options, progress=progress.update)
    if what_if is None and not wanted and options.objective == "step":
        console.notice("what-ifs may take long here, so they are not priced: --what-if prices them")
    return solution, None


def _show(solution: "Solution", profile: "Profile", robustness: "Robustness | None", *, as_json: bool) -> None:
    """Print what was found, as tables or as one object."""
    from assigner.report.robustness import robustness_data, robustness_report
    from assigner.report.solution import solution_data, solution_report

    if as_json:
        data = solution_data(solution, profile=profile)
        if robustness is not None:
            data["derived"]["robustness"] = robustness_data(robustness)
        console.show_json(data)
    elif not console.settings().quiet:
        more = () if robustness is None else robustness_report(robustness)
        console.show((*solution_report(solution, profile=profile, everything=console.settings().verbose), *more))


def _sign(plan: "Plan", profile: Path) -> "Plan":
    """The plan saying where it comes from."""
    from dataclasses import replace
    from datetime import UTC, datetime

    from assigner import __version__
    from assigner.origin import file_hash
    from assigner.plan import ProfileReference

    return replace(
        plan,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tool_version=__version__,
        profile=ProfileReference(str(profile), file_hash(profile)),
    )
