"""What limits a plan, in one sentence: the worker or the link that is busiest, and memory where it costs time.

It says what the plan's own prediction says, so every command that shows a plan has it, with or without a profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt

if TYPE_CHECKING:
    from assigner.plan import Plan, Prediction, WorkerPrediction

_BUSY = 0.9
"""A worker that computes for this share of the step waits for nothing worth a word."""


def limiting(plan: Plan, prediction: Prediction) -> str:
    """The sentence for a plan with its prediction.

    Args:
        plan: Who holds what.
        prediction: What the simulator says of it; the plan's own plays no part.
    """
    step = prediction.step_s or 1.0
    busiest, *others = sorted(prediction.workers, key=lambda each: -each.compute_s)
    link = max(prediction.transfers, key=lambda each: each.seconds, default=None)
    if link is not None and link.seconds > busiest.compute_s:
        sentence = (
            f"the link from {link.source} to {link.target} limits the plan: messages are on it for"
            f" {_share(link.seconds, step)} of the step, and the busiest worker, {busiest.worker}, computes for"
            f" {_share(busiest.compute_s, step)}"
        )
    else:
        sentence = (
            f"{busiest.worker} limits the plan: it computes for {_share(busiest.compute_s, step)} of the step"
            f" ({_each(busiest.compute_s, plan.micro_batches)}){_waiting(busiest, step)}"
        )
        if others:
            sentence += f"; the next, {others[0].worker}, for {_share(others[0].compute_s, step)}"
    again = sum(len(each.rematerialise) for each in plan.stages)
    if again:
        sentence += f"; to save memory {again} of {len(plan.partitions)} partitions run forward twice"
    return sentence


def _share(seconds: float, step: float) -> str:
    return f"{100 * seconds / step:.0f} %"


def _each(seconds: float, count: int) -> str:
    """What a micro-batch takes of a worker's time, its part of the update included."""
    once = fmt.seconds(seconds / count)
    return f"{once} for its micro-batch" if count == 1 else f"{once} for each of {count} micro-batches"


def _waiting(worker: WorkerPrediction, step: float) -> str:
    """What even the busiest worker waits for: messages, and the pipeline that fills and drains."""
    if worker.compute_s >= _BUSY * step:
        return ""
    messages = f"waits {_share(worker.transfer_s, step)} for messages and " if worker.transfer_s >= 0.01 * step else ""
    return f", {messages}stands idle for {_share(worker.idle_s, step)}"
