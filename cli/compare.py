"""`assigner compare`: plans side by side."""

from pathlib import Path
from typing import Annotated

import typer

from assigner.errors import UsageError

from . import console
from .options import Json


def compare_command(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN PLAN...", help="The first is the baseline.")],
    *,
    everything: Annotated[bool, typer.Option("--all", help="List all partitions, not only changed ones.")] = False,
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where the plans differ.")] = False,
) -> None:
    """Compare plans: what each gains, and what moved."""
    from assigner.plan import load_plan
    from assigner.report.comparison import Named, comparison_data, comparison_report, differ
    from assigner.report.sheet import markdown

    if len(plans) < 2:
        raise UsageError(f"one plan, {plans[0]}, is nothing to compare", hint="name two or more plans")
    if as_json and as_markdown:
        raise UsageError("--json and --md are both given", hint="choose one of them")
    named = [Named(name, load_plan(path)) for name, path in zip(_names(plans), plans, strict=True)]
    if as_json:
        console.show_json(comparison_data(named))
    elif as_markdown:
        console.show_text(markdown(comparison_report(named, everything=everything)))
    else:
        console.show(comparison_report(named, everything=everything))
    if exit_code and differ(named):
        raise typer.Exit(1)


def _names(paths: list[Path]) -> list[str]:
    """The files' names; where two are alike, the paths as they were given."""
    short = [path.name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
