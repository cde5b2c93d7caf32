"""How the step time changes with the number of micro-batches: the placement priced at each that the batch allows.

Partitions, rematerialisation and schedule stay as they are, so this is no search; what the solver found under another
number, with another placement, stands beside it where the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner.formats.document import encode
from assigner.formats.fineness import rows_each
from assigner.formats.orders import INPUT
from assigner.schedule.simulate import step_s, worker_memory

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.report.page.shown import Shown
    from assigner.schedule.cost import CostModel

MOST = 512
"""Micro-batches above which no plan is priced."""
IMPLAUSIBLE = "not plausible: extrapolated, it costs less a sample than the sizes that were measured"


@dataclass(frozen=True)
class Split:
    """The placement at one number of micro-batches.

    Args:
        micro_batches: In a step.
        step_s: The step time; None: the profile cannot price it, and `why` says so.
        fullest: The worker that is fullest, with its peak and its capacity in bytes; None: not priced.
        measured: The size was measured; else the cost model draws a line through sizes that were.
        why: Why it is not priced.
    """

    micro_batches: int
    step_s: float | None
    fullest: tuple[str, float, float] | None
    measured: bool
    why: str = ""

    @property
    def fits(self) -> bool:
        """True if every worker's peak is within its capacity."""
        return self.fullest is not None and self.fullest[1] <= self.fullest[2]


def splits(plan: Plan, cost: CostModel) -> tuple[Split, ...]:
    """The plan's placement at every number of micro-batches that its batch may be cut into, fewest first."""
    batch = plan.workload.batch_size
    counts = dict.fromkeys(-(-batch // size) for size in range(batch, 0, -1))
    most = min(MOST, plan.workload.fineness.most(batch))
    return tuple(_priced(plan, cost, count) for count in counts if count <= most or count == plan.micro_batches)


def _priced(plan: Plan, cost: CostModel, count: int) -> Split:
    size = -(-plan.workload.batch_size // count)
    held = [(name, worker) for stage in plan.stages for worker in stage.workers for name in stage.partitions]
    obstacles = (cost.obstacle(name, worker, size) for name, worker in held)
    why = next((each for each in obstacles if each is not None), None)
    if why is None and not cost.is_plausible(size):
        why = IMPLAUSIBLE
    if plan.orders and why is None:
        why = _not_listed(plan, cost, count, size)
    measured = all(any(point.micro_batch == size for point in cost.measurements(*pair)) for pair in held)
    if why is not None:
        return Split(count, None, None, measured, why)
    other = plan.cut(count, size, batch_size=plan.workload.batch_size)
    peaks = [
        (name, worker_memory(cost, other, name).total, cost.profile.worker[name].capacity_bytes)
        for name in plan.workers
    ]
    fullest = max(peaks, key=lambda peak: peak[1] / peak[2] if peak[2] else float("inf"))
    return Split(count, step_s(other, cost), fullest, measured)


def _not_listed(plan: Plan, cost: CostModel, count: int, size: int) -> str | None:
    """Why listed orders cannot be priced at a number of micro-batches; None: they can."""
    if count > plan.micro_batches:
        return f"the plan lists its orders for {plan.micro_batches} micro-batches"
    halved = {(step.stage, worker) for worker, steps in plan.listed.items() for step in steps if step.letter == INPUT}
    prices = (cost.partition(name, worker, size) for n, worker in halved for name in plan.stages[n].partitions)
    return "the parts of backwards were not measured there" if any(each.parts is None for each in prices) else None


def splits_figures(page: Shown, bound_s: float | None) -> dict[str, Any]:
    """The same for the chart, with the candidates of the solver where they are step times, and the search's bound."""
    batch = page.plan.workload.batch_size
    looked_at = page.plan.candidates if page.plan.objective == "step" else ()
    return {
        "micro_batches": page.plan.micro_batches,
        "placement": [
            {
                "micro_batches": each.micro_batches, "rows": rows_each(batch, each.micro_batches),
                "step_s": each.step_s, "fits": each.fits, "measured": each.measured, "why": each.why,
            }
            for each in page.splits
        ],
        "candidates": [{**encode(each), "rows": rows_each(batch, each.micro_batches)} for each in looked_at],
        "bound_s": bound_s,
    }  # fmt: skip
