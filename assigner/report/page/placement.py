"""Where the partitions are: a strip for each plan, partitions from left to right, one colour for each worker.

A stage of several workers names all of them, and has the colour of the first.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.location import Location
from assigner.report.page.markup import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.page.shown import Shown

SHADES = 8
"""Colours of workers, by rank; further ranks begin again."""


def placement_html(pages: Sequence[Shown]) -> str:
    """The strips of plans, one above the other, so that a partition stands at the same place in all of them."""
    rows = "".join(_strip(page, named=len(pages) > 1) for page in pages)
    return f'<div class="placement">{rows}</div>'


def _strip(page: Shown, *, named: bool) -> str:
    name = f"<p>{escape(page.name)}</p>" if named else ""
    stages = []
    for stage in page.plan.stages:
        again = len(stage.rematerialise)
        text = f"{' + '.join(stage.workers)}: {fmt.ranges(stage.partitions)}"
        text += f"; {again} rematerialised" if again else ""
        shade = Location.parse(stage.workers[0]).rank % SHADES
        held = " + ".join(short(worker) for worker in stage.workers)
        kind = f"grow{len(stage.partitions)} shade{shade}{' again' if again else ''}"
        stages.append(
            f'<li class="{kind}" title="{escape(text)}"><b>{escape(held)}</b> '
            f"<span>{escape(fmt.ranges(stage.partitions))}{', remat' if again else ''}</span></li>"
        )
    return f"{name}<ol>{''.join(stages)}</ol>"


def placement_css(pages: Sequence[Shown]) -> str:
    """How wide stages are: by their partitions. Rules, since the page allows no styles in its elements."""
    sizes = sorted({len(stage.partitions) for page in pages for stage in page.plan.stages})
    return "".join(f".grow{size}{{flex:{size} 1 0}}\n" for size in sizes)
