"""What a machine has for measuring, solving and training, and how to get what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from assigner.formats.document import encode
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Group = Literal["needed", "machine", "optional"]
_TITLES: dict[Group, str] = {"needed": "what assigner needs", "machine": "this machine", "optional": "optional"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Args:
        what: Its name.
        state: `ok`; `absent`: not here, and nothing needs it; `note`: worth knowing; `missing`: something cannot be
            done without it.
        detail: Version, size, or what is missing.
        remedy: How to get it; empty where nothing is missing.
        value: The same as a plain value, for `--json`.
        group: The table that it stands in.
    """

    what: str
    state: Literal["ok", "absent", "note", "missing"]
    detail: str
    remedy: str = ""
    value: Any = None
    group: Group = "needed"


def doctor_report(findings: Sequence[Finding]) -> Report:
    """What `assigner doctor` prints: a table a group, how to get what is not here, and a verdict."""
    return (*_sheets(findings), *_remedies(findings), _verdict(findings))


def _sheets(findings: Sequence[Finding]) -> Iterator[Sheet]:
    width = max((len(each.what) for each in findings), default=0)
    for group, title in _TITLES.items():
        mine = [each for each in findings if each.group == group]
        if mine:
            rows = tuple((each.what.ljust(width), each.state.ljust(len("missing")), each.detail) for each in mine)
            marked = frozenset(n for n, each in enumerate(mine) if each.state == "missing")
            yield Sheet(title, (Column("", "name"), Column("state", "name"), Column("found", "text")), rows, marked)


def _remedies(findings: Sequence[Finding]) -> Iterator[Line]:
    """What must or should be done, then what can be."""
    for each in sorted(findings, key=lambda each: each.state == "absent"):
        if each.remedy:
            yield Line(f"{each.what}: {each.remedy}", "plain" if each.state == "absent" else "warning")


def _verdict(findings: Sequence[Finding]) -> Line:
    missing = [each.what for each in findings if each.state == "missing"]
    if missing:
        return Line(f"missing: {', '.join(missing)}", "warning")
    return Line("ready to profile, solve and train", "strong")


def is_ready(findings: Sequence[Finding]) -> bool:
    """True if nothing is missing that something needs."""
    return all(each.state != "missing" for each in findings)


def doctor_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "kind": "doctor",
        "ready": is_ready(findings),
        "findings": [encode(each) for each in findings],
    }
