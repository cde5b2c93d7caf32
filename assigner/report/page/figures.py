"""All figures of a page as plain data: what its charts draw, and what `assigner report --json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.report.page.measured import measured_data
from assigner.report.page.memory import memory_data
from assigner.report.page.splits import splits, splits_data
from assigner.report.page.timeline import timeline_data
from assigner.report.plan import status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.page.shown import Shown


def page_data(pages: Sequence[Shown], *, title: str) -> dict[str, Any]:
    """The figures of all plans; the first one is the baseline.

    Args:
        pages: The plans.
        title: Of the page.
    """
    workload = pages[0].plan.workload
    return {
        "kind": "report",
        "title": title,
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "plans": [_plan(each, pages[0]) for each in pages],
    }


def _plan(page: Shown, baseline: Shown) -> dict[str, Any]:
    plan, predicted, line = page.plan, page.predicted, timeline_data(page)
    return {
        "name": page.name,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "step_s": predicted.step_s,
        "samples_per_s": predicted.samples_per_s,
        "bubble_fraction": predicted.bubble_fraction,
        "speed_up": fmt.against(baseline.predicted.step_s, predicted.step_s),
        "status": status(plan.solver) if plan.solver else None,
        "stages": [
            {"worker": stage.worker, "partitions": fmt.ranges(stage.partitions), "remat": len(stage.rematerialise)}
            for stage in plan.stages
        ],
        "timeline": line,
        "measured": [measured_data(page, run, line["jobs"]) for run in page.runs],
        "memory": memory_data(page),
        "splits": splits_data(page, splits(page)),
    }
