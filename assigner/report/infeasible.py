"""Ways out of a problem that has no plan, in one short table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from assigner.errors import InfeasibleError

CHEAPEST = " (cheapest)"
"""Marks the way out that changes least: flags before training, and training before machines."""


def ways_out_report(error: InfeasibleError) -> Report:
    """What stands below the error: the changes with which there is a plan, and what was not tried; empty: neither."""
    parts: list[Sheet | Line] = []
    if error.ways_out:
        time = fmt.time_unit(*(way.step_s for way in error.ways_out))
        columns = (Column("what changes", "text"), Column("how", "text"), Column(f"step {time.name}"))
        rows = tuple(
            (way.what + (CHEAPEST if n == 0 else ""), way.how, time.show(way.step_s))
            for n, way in enumerate(error.ways_out)
        )
        parts.append(Sheet("with one of these changes there is a plan", columns, rows, frozenset({0})))
    if error.untried:
        parts.append(Line(f"not known, for the time was over: {', '.join(error.untried)}", "warning"))
    return tuple(parts)
