"""Names of hosts beside those of workers, where the workers are on several."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.report.sheet import GAP, Column, Part, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.formats.profile import Profile

_HEADER = "host"
_RANK = 2
"""It leaves a table that is too wide before the figures that a plan is judged by."""


def host_names(profile: Profile | None) -> dict[str, str]:
    """The host of each worker; nothing where all are on one, or nobody knows."""
    found = {} if profile is None else {worker.name: worker.host for worker in profile.workers}
    return found if len(set(found.values())) > 1 else {}


def host_width(profile: Profile | None) -> int:
    """Columns of the terminal that the names take beside others."""
    return max((max(len(_HEADER), len(host)) + GAP for host in host_names(profile).values()), default=0)


def with_hosts(report: Iterable[Part], profile: Profile | None) -> tuple[Part, ...]:
    """A report whose tables of workers name their hosts.

    Args:
        report: Tables with a column `worker` get one more behind it.
        profile: What knows the hosts.
    """
    hosts = host_names(profile)
    return tuple(_named(part, hosts) if hosts and isinstance(part, Sheet) else part for part in report)


def _named(sheet: Sheet, hosts: Mapping[str, str]) -> Sheet:
    place = next((n + 1 for n, column in enumerate(sheet.columns) if column.header == "worker"), 0)
    if not place or not any(row[place - 1] in hosts for row in sheet.rows):
        return sheet
    columns = (*sheet.columns[:place], Column(_HEADER, "name", rank=_RANK), *sheet.columns[place:])
    rows = tuple((*row[:place], hosts.get(row[place - 1], ""), *row[place:]) for row in sheet.rows)
    return replace(sheet, columns=columns, rows=rows)
