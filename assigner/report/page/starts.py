"""The simulated step as a table that needs no script: when each micro-batch starts at each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from assigner.report.page.shown import Shown

MOST = 4096
"""Actions above which a table of all of them helps nobody, and makes the page large."""


_WORDS = {
    "forward": "forward", "backward": "backward", "backward_input": "input part", "backward_weight": "weight part"
}  # fmt: skip


def starts_sheet(page: Shown) -> Report:
    """A row for each micro-batch, a forward's and a backward's start for each stage; the stages' table has lengths."""
    plan, count = page.plan, len(page.plan.stages)
    if 2 * count * plan.micro_batches > MOST:
        return (Line(f"More than {MOST:,} actions: their starts are in the figures of `assigner report --json`."),)
    time = fmt.time_unit(page.timeline.step_s)
    starts = {
        (event.action.kind.value, event.action.stage, event.action.micro_batch): time.show(event.start_s)
        for event in page.timeline.events
        if event.action.route is None
    }
    done = {key[:2] for key in starts}
    kinds = [(stage, kind) for stage in range(count) for kind in _WORDS if (kind, stage) in done]
    rows = tuple(
        (str(m), *(starts.get((kind, stage, m), fmt.NOTHING) for stage, kind in kinds))
        for m in range(plan.micro_batches)
    )  # fmt: skip
    columns = Column("micro-batch"), *(Column(f"{_WORDS[kind]} {stage}") for stage, kind in kinds)
    title = f"When each micro-batch starts, in {time.name}: forward and backward of each stage, as simulated"
    return (Sheet(title, columns, rows),)
