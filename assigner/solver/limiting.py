"""What limits a plan, in one sentence: the worker or the link that is busiest, and memory where it costs time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.schedule import Kind
from assigner.simulate import stage_s

if TYPE_CHECKING:
    from assigner.cost import CostModel
    from assigner.plan import Plan, Prediction


def limiting(plan: Plan, prediction: Prediction, cost: CostModel) -> str:
    """The sentence for a plan with its prediction."""
    worker = max(prediction.workers, key=lambda each: each.compute_s)
    step = prediction.step_s or 1.0
    link = max(prediction.transfers, key=lambda each: each.seconds, default=None)
    if link is not None and link.seconds > worker.compute_s:
        sentence = (
            f"the link from {link.source} to {link.target} limits the plan:"
            f" messages are on it for {100 * link.seconds / step:.0f} % of the step"
        )
    else:
        held = [n for n, each in enumerate(plan.stages) if each.worker == worker.worker]
        forward, backward = (sum(stage_s(cost, plan, n, kind) for n in held) for kind in (Kind.FORWARD, Kind.BACKWARD))
        longer, count = max(forward, backward), plan.micro_batches
        times = "its micro-batch" if count == 1 else f"each of {count} micro-batches"
        sentence = (
            f"{worker.worker} limits the plan: it computes for {100 * worker.compute_s / step:.0f} % of the step,"
            f" mostly {'backward' if backward >= forward else 'forward'}"
            f" ({fmt.time_unit(longer).text(longer)} for {times})"
        )
    again = sum(len(each.rematerialise) for each in plan.stages)
    if again:
        sentence += f"; to save memory {again} of {len(plan.partitions)} partitions run forward twice"
    return sentence
