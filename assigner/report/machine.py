"""What a machine has for measuring, solving and training, and how to get what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from assigner.document import encode
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Args:
        what: Its name.
        state: `ok`; `note`: worth knowing; `missing`: something cannot be done without it.
        detail: Version, size, or what is missing.
        remedy: How to get it; empty where nothing is missing.
        value: The same as a plain value, for `--json`.
    """

    what: str
    state: Literal["ok", "note", "missing"]
    detail: str
    remedy: str = ""
    value: Any = None


def machine_report(findings: Sequence[Finding]) -> Report:
    """What `assigner doctor` prints."""
    rows = tuple((each.what, each.state, each.detail) for each in findings)
    marked = frozenset(n for n, each in enumerate(findings) if each.state == "missing")
    sheet = Sheet("this machine", (Column("", "name"), Column("state", "name"), Column("found", "text")), rows, marked)
    return (
        sheet,
        *(Line(f"{each.what}: {each.remedy}", "warning") for each in findings if each.remedy),
        _verdict(findings),
    )


def _verdict(findings: Sequence[Finding]) -> Line:
    missing = [each.what for each in findings if each.state == "missing"]
    if missing:
        return Line(f"missing: {', '.join(missing)}", "warning")
    return Line("ready to profile, solve and train", "strong")


def machine_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "kind": "doctor",
        "ready": all(each.state != "missing" for each in findings),
        "findings": [encode(each) for each in findings],
    }
