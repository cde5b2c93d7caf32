"""The critical path as a table: what the step's length is made of."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.page.markup import barred
from assigner.report.sheet import Column, Sheet
from assigner.schedule.criticalpath import time_on_path

if TYPE_CHECKING:
    from assigner.schedule.simulate import Timeline

MOST = 10
"""Rows of the path's table; what takes least is added up in the last one."""


def critical_sheet(timeline: Timeline) -> Sheet:
    """The path's actions and messages, added up by what and where they are; where it spends most stands first."""
    spent = time_on_path(timeline)
    on: dict[str, float] = defaultdict(float)
    for (_, where), times in spent.items():
        on[" -> ".join(where)] += sum(times)
    time = fmt.time_unit(timeline.step_s)
    found = sorted(((sum(times), len(times), what, " -> ".join(where)) for (what, where), times in spent.items()),
                   reverse=True)  # fmt: skip
    rest = found[MOST - 1 :] if len(found) > MOST else []
    found = sorted(found[: len(found) - len(rest)], key=lambda each: (-on[each[3]], each[3], -each[0]))
    if rest:
        whole = sum(each[0] for each in rest), sum(each[1] for each in rest)
        found.append((*whole, f"{len(rest)} others", ""))
    rows = tuple(
        (what, where, fmt.count(count), time.show(seconds), barred(fmt.against(seconds, timeline.step_s) or 0.0))
        for seconds, count, what, where in found
    )
    columns = (Column("what", "name"), Column("where", "name"), Column("times"), Column(time.name), Column("", "name"))
    return Sheet("The critical path: what the step is made of, from its start to its end without a gap", columns, rows)
