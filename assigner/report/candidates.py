"""The schedules and micro-batch counts that a search looked at, the chosen one marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.formats.fineness import cut_text
from assigner.report.sheet import Column, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.solverreport import Candidate

WHAT = {"step": "step", "throughput": "steady batch", "latency": "forward", "cost": "step"}
"""What candidates are compared by, by objective."""

CHOSEN = "chosen"
"""The status of the candidate that became the plan."""


def candidates(plan: Plan, *, most: int | None = None) -> Report:
    """The candidates of a plan as a table; nothing where it has none.

    Args:
        plan: What was solved.
        most: How many are shown, the chosen one and those nearest to it; None: all.
    """
    if not plan.candidates:
        return ()
    shown = plan.candidates if most is None else _nearest(plan.candidates, most)
    time = fmt.time_unit(*(each.objective_s for each in shown))
    bounds = (each.bound_s if each.bound_s and math.isfinite(each.bound_s) else None for each in shown)
    rows = [
        (
            (Column("schedule", "name"), each.schedule),
            (Column("micro-batches"), cut_text(plan.workload.batch_size, each.micro_batches)),
            (Column(f"{WHAT[plan.objective]} {time.name}"), time.show(each.objective_s)),
            (Column(f"bound {time.name}"), time.show(bound)),
            (Column("status", "text"), each.status),
        )
        for each, bound in zip(shown, bounds, strict=True)
    ]
    marked = frozenset(n for n, each in enumerate(shown) if each.status == CHOSEN)
    few = len(shown) < len(plan.candidates)
    title = f"candidates, the {len(shown)} nearest of {len(plan.candidates)} (-v lists all)" if few else "candidates"
    return (Sheet.of(title, rows, marked),)


def _nearest(found: Sequence[Candidate], most: int) -> Sequence[Candidate]:
    """Those that came nearest, by what was found or else by their bound, in the order of the search."""

    def distance(each: Candidate) -> tuple[bool, float]:
        reached = each.objective_s if each.objective_s is not None else each.bound_s
        return each.status != CHOSEN, math.inf if reached is None else reached

    kept = sorted(range(len(found)), key=lambda n: distance(found[n]))[:most]
    return [found[n] for n in sorted(kept)]
