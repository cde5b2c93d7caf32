"""`assigner doctor`: what this machine has, and what is missing."""

from . import console
from .options import Json


def doctor_command(*, as_json: Json = False) -> None:
    """Show what this machine has, and what is missing."""
    from assigner.report.machine import machine_data, machine_report

    from .machine import examine

    findings = examine()
    if as_json:
        console.show_json(machine_data(findings))
    else:
        console.show(machine_report(findings))
