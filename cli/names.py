"""What completion offers for a flag's value: partitions and workers of the profile on the line, functions of a file."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from assigner.files import read_text

if TYPE_CHECKING:
    from assigner.formats.profile import Profile


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions; behind a comma the next one."""
    return _after_comma(incomplete, _profile(ctx).order)


def workers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Workers; behind a comma the next one."""
    return _after_comma(incomplete, tuple(_profile(ctx).worker))


def amounts(ctx: typer.Context, incomplete: str) -> list[str]:
    """Workers with the `=` that stands before an amount."""
    return [] if "=" in incomplete else [f"{name}=" for name in _profile(ctx).worker]


def pins(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions up to the `=`, workers behind it."""
    partition, equals, _ = incomplete.partition("=")
    found = _profile(ctx)
    return [f"{partition}={name}" for name in found.worker] if equals else [f"{name}=" for name in found.order]


def functions(incomplete: str) -> list[str]:
    """Functions of a workload's file, once its name is complete; the file is read and not run."""
    file, colon, _ = incomplete.partition(":")
    if not colon:
        return []
    try:
        tree = ast.parse(read_text(Path(file), hint=""))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    found = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f"{file}:{name}" for name in found if not name.startswith("_")]


def _profile(ctx: typer.Context) -> "Profile":
    """The profile that is already on the line.

    Raises:
        AssignerError: there is none, or it cannot be read.
    """
    from assigner.formats.profile import load_profile

    return load_profile(Path(ctx.params.get("profile") or ""))


def _after_comma(incomplete: str, names: tuple[str, ...]) -> list[str]:
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name not in before.split(",")]


WORKLOAD = typer.Argument(
    metavar="WORKLOAD", autocompletion=functions, help="FILE.py:FUNCTION, or FILE.py:FUNCTION(width=512)."
)
