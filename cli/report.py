"""`assigner report`: plans as one HTML file that needs nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import UsageError

from . import console
from .compare import load_comparable
from .options import Force, Json, PlanFiles, written

if TYPE_CHECKING:
    from assigner.report.page.shown import Shown


def report_command(
    plans: PlanFiles,
    *,
    output: Annotated[Path | None, written("FILE", help="Where to write the page.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Price all plans with this one; else each with its own.")
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="TRACE", help="Traces of runs of the plans; may be given again.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page; else the workload's name.")] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write plans as one HTML file that works offline."""
    from assigner.files import refuse_existing

    if output is None and not as_json:
        raise UsageError("no file to write the page to", hint="name one: -o report.html")
    refuse_existing(output, force=force, reads=[*plans, profile, *(measured or [])])
    pages = _pages(plans, profile, measured or [], output)
    from assigner.report.page.figures import page_data

    title = title or f"{pages[0].plan.workload.name}: {'plan' if len(pages) == 1 else 'plans side by side'}"
    if output is not None:
        _write(output, pages, title, str(profile or ""), force=force)
    if as_json:
        console.show_json(page_data(pages, title=title))


def _pages(plans: list[Path], profile: Path | None, measured: list[Path], output: Path | None) -> "list[Shown]":
    """The plans, each priced with its profile and beside its runs; the output is none of the profiles."""
    from assigner.files import refuse_input
    from assigner.formats.plan import profile_path, reference
    from assigner.formats.profile import load_profile
    from assigner.formats.trace import load_trace
    from assigner.report.page.shown import runs_of, shown

    named = load_comparable(plans)
    traces = [(str(path), load_trace(path)) for path in dict.fromkeys(measured)]
    runs = runs_of(named, traces)
    where = [profile_path(each.plan, path, profile) for each, path in zip(named, plans, strict=True)]
    if output is not None:
        refuse_input(output, where)
    profiles = {path: (load_profile(path), reference(path)) for path in set(where)}
    return [
        shown(each.name, each.plan, profiles[path][0], mine, source=profiles[path][1])
        for each, path, mine in zip(named, where, runs, strict=True)
    ]


def _write(output: Path, pages: "list[Shown]", title: str, priced_by: str, *, force: bool) -> None:
    from datetime import UTC, datetime

    from assigner import formatting as fmt
    from assigner.files import put
    from assigner.report.page.document import page_html

    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    content = page_html(pages, title=title, made_at=made_at, priced_by=priced_by).encode()
    put(output, content, force=force)
    console.notice(f"wrote {output}: {fmt.size(len(content))}, open it in a browser")
