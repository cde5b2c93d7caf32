"""`assigner compare`: plans side by side, as predicted and as measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import UsageError
from assigner.settings import whole_number

from . import console
from .options import Json
from .provenance import Known, behind

if TYPE_CHECKING:
    from assigner.report.comparison import Named
    from assigner.validation.steps import PlanRuns


def compare_command(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN PLAN...", help="The first is the baseline.")],
    *,
    baseline: Annotated[
        str | None, typer.Option(metavar="PLAN|N", help="Another baseline: a plan's file, name or number.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE", help="A trace of a run of one of them; it says of which. Repeatable."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Price all plans anew with these measurements.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all partitions, not only changed ones.")] = False,
    precision: Annotated[
        int | None, typer.Option(min=0, max=9, metavar="N", help="Digits behind the point of every figure.")
    ] = None,
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where the plans differ.")] = False,
) -> None:
    """Compare plans: what each gains, and what moved.

    With --measured also what runs of them took, how sure that is, and how far off the predictions were.
    """
    from assigner.report.comparison import comparison_data, comparison_report, differ
    from assigner.report.sheet import markdown

    if len(plans) < 2:
        raise UsageError(f"one plan, {plans[0]}, is nothing to compare", hint="name two or more plans")
    if as_json and as_markdown:
        raise UsageError("--json and --md are both given", hint="choose one of them")
    named = _baseline_first(load_named(plans, profile), plans, baseline)
    traces, priced_by = measured_runs(named, measured or []), str(profile) if profile else ""
    if as_json:
        console.show_json(comparison_data(named, traces=traces, priced_by=priced_by))
    else:
        report = comparison_report(named, everything=everything, traces=traces, priced_by=priced_by, digits=precision)
        if as_markdown:
            console.show_text(markdown(report))
        else:
            console.show(report)
    if exit_code and differ(named):
        raise typer.Exit(1)


def load_named(paths: list[Path], profile: Path | None) -> "list[Named]":
    """The plans with their names, as far as they hold by their profiles, and with what their workers cost.

    Prices are of workers, not of plans: a plan that was solved with none has those of the first that was.
    """
    from assigner.report.comparison import Named, stored_prices

    loaded = load_comparable(paths)
    prices = {each.name: stored_prices(each.plan) for each in loaded if stored_prices(each.plan)}
    lender = next(iter(prices), "")
    known: Known = {}
    found = []
    for each, path in zip(loaded, paths, strict=True):
        (plan, notes), source, _ = behind(each.plan, path, profile, known=known)
        told = notes if profile is None or plan.predicted is None else ()  # that all are priced anew is said once
        if lender and each.name not in prices:
            told = (*told, f"its workers cost what {lender} was solved with")
        found.append(Named(each.name, plan, source, told, prices.get(each.name, prices.get(lender, {}))))
    return found


def load_comparable(paths: list[Path]) -> "list[Named]":
    """The plans as their files have them, with their names; they are for one workload."""
    from assigner.formats.plan import load_plan
    from assigner.report.comparison import Named, check_comparable

    loaded = [Named(name, load_plan(path)) for name, path in zip(plan_names(paths), paths, strict=True)]
    check_comparable(loaded)
    return loaded


def plan_names(paths: list[Path]) -> list[str]:
    """The files' names; where two are alike, of their paths what tells them apart."""
    parts = [path.parts or (str(path),) for path in paths]
    if len(set(parts)) < len(parts) or len({each[-1] for each in parts}) == len(parts):
        short = [path.name for path in paths]
        return [f"{name} ({n})" if short.count(name) > 1 else name for n, name in enumerate(short, start=1)]
    while all(len(each) > 1 for each in parts) and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    while all(len(each) > 1 for each in parts) and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return [str(Path(*each)) for each in parts]


def _baseline_first(named: "list[Named]", paths: list[Path], wanted: str | None) -> "list[Named]":
    """The plans with the wanted baseline in front."""
    if wanted is None:
        return named
    fitting = [n for n, (each, path) in enumerate(zip(named, paths, strict=True)) if wanted in (each.name, str(path))]
    number = whole_number(wanted)
    if not fitting and number is not None and 1 <= number <= len(named):
        fitting = [number - 1]
    if not fitting:
        names = ", ".join(f"{n} {each.name}" for n, each in enumerate(named, start=1))
        raise UsageError(f"--baseline: {wanted!r} is none of these plans", hint=f"they are {names}")
    return [named[fitting[0]], *(each for n, each in enumerate(named) if n != fitting[0])]


def measured_runs(named: "list[Named]", files: list[Path]) -> "dict[str, PlanRuns]":
    """What the traces say of the plans, by name; each trace says of which one it is."""
    if not files:
        return {}
    from assigner.formats.trace import load_trace
    from assigner.validation.steps import runs_by_plan

    pairs = [(each.name, each.plan) for each in named]
    return runs_by_plan(pairs, [(str(file), load_trace(file)) for file in dict.fromkeys(files)])
