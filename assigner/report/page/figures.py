"""All figures of a page as plain data: what its charts draw, and what `assigner report --json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.report.comparison import figures_data
from assigner.report.page.measured import run_figures
from assigner.report.page.search import bound_s
from assigner.report.page.simulated import memory_figures, timeline_figures
from assigner.report.page.splits import splits_figures

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
    plan = page.plan
    return {
        "name": page.name,
        **figures_data(plan, pages[0].plan),
        "stages": [
            {
                "worker": " + ".join(stage.workers),
                "partitions": fmt.ranges(stage.partitions),
                "remat": len(stage.rematerialise),
            }
            for stage in plan.stages
        ],
        "timeline": timeline_figures(page),
        "measured": [run_figures(page, run) for run in page.runs],
        "memory": memory_figures(page),
        "splits": splits_figures(page, bound_s(pages, page)),
    }
