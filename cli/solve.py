"""`assigner solve`: from a profile to a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assigner.errors import FormatError, UsageError
from assigner.solver.problem.options import GOAL, HINTS, SEARCH, SolveOptions

from . import console
from .configuration import settings_file
from .given import Given
from .options import Config, Force, Json, ProfileFile, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver import Solution
    from assigner.solver.robust.robustness import Robustness


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
    output: Annotated[Path | None, written("PLAN", help="Write the plan here (required without --json).")] = None,
    export_model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Write the integer program here, too: a file.lp or a file.mps.")
    ] = None,
    force: Force = False,
    options: Given[SolveOptions],
    robust: Annotated[
        bool, _option("--robust", panel=GOAL, help="Solve for the slow end of the measurements, and say how sure.")
    ] = False,
    complete: Annotated[
        Path | None,
        _option("--complete", panel=HINTS, metavar="PLAN", help="Keep what this partial plan says, place the rest."),
    ] = None,
    config: Config = None,
    what_if: Annotated[
        bool | None,
        _option(
            "--what-if/--no-what-if", panel=SEARCH, help="Price more micro-batches, one more worker, a wider wire."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=_check_baseline,
            autocompletion=_complete_baseline,
            help="Write this simple placement as the plan instead: single, equal, proportional, balance, pipedream,"
            " greedy, weighted, data-parallel or data-parallel-by-speed.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place the partitions, and say how near optimal the plan is.

    Names of partitions may be patterns: --pin 'block.*=host1'. Settings may come from the environment
    (ASSIGNER_SOLVER=cbc) and from a TOML file; a flag counts for more.
    """
    from dataclasses import replace

    from assigner.formats.document import now
    from assigner.formats.plan import reference, save_plan
    from assigner.formats.profile import load_profile
    from assigner.schedule.simulate import check_step
    from assigner.version import __version__

    if output is None and not as_json:
        raise UsageError("no output is named", hint="-o plan.json writes the plan; --json prints it")
    _guard([output, export_model], force=force, reads=[profile, complete, settings_file(config)])
    if export_model is not None and (robust or baseline is not None):
        raise UsageError(
            "--export-model goes with a search for the best plan of the profile", hint="leave out one of the two"
        )
    asked = options()
    if what_if and (robust or baseline is not None or asked.objective != "step"):
        raise UsageError("--what-if goes with a search for the step time", hint="leave out one of the two")
    loaded = load_profile(profile)
    origin = reference(profile)  # before the search: some paths no plan may name
    for line in unlinked(loaded, asked.only):
        console.notice(line)
    if complete is not None:
        asked = _completing(asked, complete, loaded)
    for line in _left_out(loaded, asked):
        console.notice(line)
    if export_model is not None:
        from assigner.solver.export import check_exportable

        shared = asked.max_replicas is None and asked.shares
        if asked.schedule == "auto":
            asked = replace(asked, schedule="one-stage")
        asked = replace(asked, max_replicas=1) if shared else asked
        check_exportable(loaded, asked, export_model)
        if shared:
            console.notice(
                "one worker a stage (--max-replicas 1): the integer program states no stages that are shared"
            )
    solution, robustness = _solved(loaded, asked, baseline=baseline, robust=robust, what_if=what_if)
    signed = replace(solution.plan, created_at=now(), tool_version=__version__, profile=origin)
    solution = replace(solution, plan=signed)
    check_step(solution.plan, loaded)
    if output is not None:
        save_plan(solution.plan, output, force=force)
    _show(solution, loaded, robustness, as_json=as_json)
    if output is not None:
        console.notice(f"wrote {output}")
    if export_model is not None:
        _export(solution.plan, loaded, asked, export_model, force=force)


def _guard(outputs: "list[Path | None]", *, force: bool, reads: "list[Path | None]") -> None:
    """Raise UsageError where an output cannot be written, or two are one file."""
    from assigner.files import is_same_file, refuse_existing

    for path in outputs:
        refuse_existing(path, force=force, reads=reads)
    named = [path for path in outputs if path is not None]
    if len(named) > 1 and is_same_file(*named):
        raise UsageError(f"--output and --export-model both name {named[0]}", hint="give each a name of its own")


def _completing(options: SolveOptions, path: Path, profile: "Profile") -> SolveOptions:
    """The options with what the partial plan of a file says; what does not fit names the file."""
    from assigner.formats.plan import load_plan
    from assigner.solver import completing

    part = load_plan(path)
    try:
        return completing(options, part, profile)
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error


def _export(plan: "Plan", profile: "Profile", options: SolveOptions, path: Path, *, force: bool) -> None:
    """Write the integer program, and say of what it is."""
    from assigner import formatting as fmt
    from assigner.solver.export import export_model

    from .progress import SolveProgress

    with SolveProgress(time_limit=options.time_limit) as progress:
        written = export_model(plan, profile, options, path, force=force, progress=progress.update)
    size = f"{fmt.plural(written.variables, 'variable')}, {fmt.plural(written.rows, 'row')}"
    if written.optimum_s is None:
        told = "its optimum is a lower bound of the step time: the proof was not closed"
    else:
        told = f"its optimum, {written.optimum_s / written.unit_s:.6g} units of {fmt.seconds(written.unit_s)}, is "
        told += "the least step time of these plans"
    console.notice(f"wrote {path}: the integer program of {written.scope} ({size}); {told}")


def unlinked(profile: "Profile", only: "Sequence[str]") -> "Iterator[str]":
    """A line on each worker that may be used and can talk to no other one."""
    used = [w.name for w in profile.workers if not only or any(profile.matches(spec, w) for spec in only)]
    for name in used if len(used) > 1 else ():
        if not any((name, other) in profile.link and (other, name) in profile.link for other in used):
            yield f"{name} has no links to and from another worker: it can hold the whole model, or nothing"


def _left_out(profile: "Profile", options: SolveOptions) -> "Iterator[str]":
    """A line on the numbers of micro-batches that no plan is looked for with."""
    from assigner.schedule.cost import CostModel
    from assigner.solver.problem.hints import resolve

    used, plain = resolve(profile, options)
    if found := plain.left_out(CostModel(used)):
        yield (
            f"no plan is looked for with {', '.join(map(str, found))} micro-batches: these are smaller than what was"
            " measured, and the times, continued to them, promise less for each sample than was measured"
            " (profile --micro-batches measures smaller ones; solve --micro-batches asks for one all the same)"
        )


def _solved(
    profile: "Profile", options: SolveOptions, *, baseline: str | None, robust: bool, what_if: bool | None
) -> "tuple[Solution, Robustness | None]":
    """The plan with what else was found, and how it holds up where that was asked for."""
    from assigner.solver import Solution, solve, solve_baseline

    from .progress import SolveProgress

    if baseline is not None:
        return Solution(solve_baseline(profile, baseline, options)), None
    with SolveProgress(time_limit=options.time_limit) as progress:
        if robust:
            from assigner.solver.robust.robustness import solve_robust

            return solve_robust(profile, options, progress=progress.update, draws_progress=progress.draws)
        solution = solve(profile, options, progress=progress.update)
        from assigner.solver.whatif import price_what_ifs, what_ifs_are_cheap

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
