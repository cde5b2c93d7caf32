"""`assigner doctor`: what this machine has, and what is missing."""

import typer

from assigner.errors import UsageError

from . import console
from .options import Json


def doctor_command(*, as_json: Json = False) -> None:
    """Show what this machine has, and what is missing.

    Versions, solvers (each solves a small problem), processor, threads, memory, devices, backends and what is optional;
    with it how to get what is not here. The exit code is 2 if something that assigner needs is missing, else 0.
    """
    from .findings import doctor_data, doctor_report, examine, is_ready

    findings = examine()
    if as_json:
        console.show_json(doctor_data(findings))
    else:
        console.show(doctor_report(findings))
    if not is_ready(findings):
        raise typer.Exit(UsageError.exit_code)
