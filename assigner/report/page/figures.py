"""All figures of a page as plain data: what its charts draw, and what `assigner report --json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.report.comparison import samples_per_s
from assigner.report.page.measured import measured_data
from assigner.report.page.memory import memory_data
from assigner.report.page.search import bound_s
from assigner.report.page.splits import splits_data
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
        "plans": [_plan(pages, each) for each in pages],
    }


def _plan(pages: Sequence[Shown], page: Shown) -> dict[str, Any]:
    plan, predicted = page.plan, page.predicted
    return {
        "name": page.name,
        "batch_size": plan.workload.batch_size,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "step_s": predicted.step_s,
        "samples_per_s": predicted.samples_per_s,
        "bubble_fraction": predicted.bubble_fraction,
        "speed_up": fmt.against(samples_per_s(plan), samples_per_s(pages[0].plan)),
        "status": status(plan.solver) if plan.solver else None,
        "stages": [
            {
                "worker": " + ".join(stage.workers),
                "partitions": fmt.ranges(stage.partitions),
                "remat": len(stage.rematerialise),
            }
            for stage in plan.stages
        ],
        "timeline": timeline_data(page),
        "measured": [measured_data(page, run) for run in page.runs],
        "memory": memory_data(page),
        "splits": splits_data(page, bound_s(pages, page)),
    }
