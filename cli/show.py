"""`assigner show`: a profile or a plan on one screen."""

import json
from pathlib import Path
from typing import Annotated

import typer

from assigner.errors import FormatError, UsageError
from assigner.files import read_bytes
from assigner.formats.document import other_kind

from . import console
from .options import Json
from .provenance import behind

_KINDS = "'profile' or 'plan'"


def show_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile or a plan.")],
    *,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="With a plan: its profile, if it is not where it was.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a profile or a plan on one screen.

    A profile: partitions, links, and how sure the figures are. A plan: stages, what limits it, which micro-batch is
    where, memory, what a change would bring. -v lists what is too long for a screen.
    """
    if _kind(file) == "plan":
        _show_plan(file, profile, as_json=as_json)
        return
    from assigner.formats.profile import load_profile
    from assigner.report.profile import profile_data, profile_report

    found = load_profile(file)
    if profile is not None:
        raise UsageError(f"--profile: {file} is a profile itself", hint=f"assigner show {file}")
    if as_json:
        console.show_json(profile_data(found))
    else:
        console.show(profile_report(found, everything=console.settings().verbose))


def _show_plan(file: Path, profile: Path | None, *, as_json: bool) -> None:
    from assigner.formats.plan import load_plan
    from assigner.report.plan import plan_data, plan_report

    (plan, notes), found, source = behind(load_plan(file), file, profile)
    if as_json:
        console.show_json(plan_data(plan, profile=found, notes=notes))
    else:
        everything = console.settings().verbose
        console.show(plan_report(plan, profile=found, source=source, notes=notes, everything=everything))


def _kind(file: Path) -> str:
    """What the file says that it is; `profile` where it is not JSON, so that the loader says why."""
    try:
        document = json.loads(read_bytes(file, hint="name a profile or a plan file"))
    except UsageError:
        raise
    except (ValueError, RecursionError):
        return "profile"
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind not in ("profile", "plan"):
        raise FormatError(
            f"{file}: {other_kind(document, _KINDS)}",
            hint="assigner show reads what assigner profile and assigner solve write",
        )
    return str(kind)
