"""What the page may say of a plan's search: its bound, where nothing on the page contradicts it, and what is left out.

A search looks at the plans that its options allow (so many workers, such schedules), with the measurements that it had:
its bound says nothing of other options. What no longer holds of a plan at all, `checked_plan` has taken from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.plan import proven_gap
from assigner.report.sheet import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.page.shown import Shown


def bound_s(pages: Sequence[Shown], page: Shown) -> float | None:
    """No step that the plan's search could have found is shorter; None: nothing is proven, or a shown plan is faster.

    Args:
        pages: All plans.
        page: One of them.
    """
    solver = page.plan.solver
    if solver is None or proven_gap(page.plan) is None or solver.options.get("robust"):
        return None  # a robust bound is of the slow end of the measurements
    batch = page.plan.workload.batch_size
    fastest = min(each.predicted.step_s for each in pages if each.plan.workload.batch_size == batch)
    return None if fastest < solver.bound_s * (1 - fmt.SHOWN) else solver.bound_s


def beaten(pages: Sequence[Shown], page: Shown) -> bool:
    """Whether a shown plan is faster than the bound of this one's search, so that its options left that plan out."""
    return bound_s([page], page) is not None and bound_s(pages, page) is None


def changed(page: Shown) -> tuple[Line, ...]:
    """Why a plan's figures are not those of its file, and how to find again what was left out for that."""
    if not page.notes:
        return ()
    lost = page.stored.solver is not None and page.plan.solver is None
    source = page.plan.profile.path if page.plan.profile else "PROFILE"
    again = f"; solve again to have it: assigner solve {source} -o PLAN" if lost else ""
    said = "; ".join(page.notes) + again
    return (Line(f"{said[0].upper()}{said[1:]}.", "warning"),)
