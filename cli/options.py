"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .configuration import load_configuration

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
PlanFiles = Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plans; the first is the baseline.")]
ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile file.")]
PricingProfile = Annotated[Path | None, typer.Option(metavar="PROFILE", help="Instead of the one it was solved from.")]
"""The profile that prices a plan."""
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="TOML",
        callback=load_configuration,
        is_eager=True,
        envvar="ASSIGNER_CONFIG",
        show_envvar=False,
        help="Take settings from this file; else from pyproject.toml.",
    ),
]
"""Settings from a file. Each command that has it is one of `configuration.TABLES`."""


def written(metavar: str, **more: Any) -> Any:
    """The flag of the file that a command writes."""
    return typer.Option("--output", "-o", metavar=metavar, **more)
