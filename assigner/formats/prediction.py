"""What a plan is predicted to cost: its step, what each worker does in it and holds, and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from assigner.formats.document import Name, Range, Share, check_unique

LEAST_STEP_S = 1e-12


StepTime = Annotated[float, Range(LEAST_STEP_S)]

_SUMS = 2e-9
"""A peak this share above what there is fits: sums of the same bytes, taken in another order, need not be equal."""


def has_room(peak_bytes: float, capacity_bytes: float) -> bool:
    """Whether a worker holds so much; searches, which add up otherwise, go half as far above it."""
    return peak_bytes <= capacity_bytes * (1 + _SUMS)


@dataclass(frozen=True)
class Memory:
    """Bytes on one worker at its peak, by what they hold.

    Args:
        parameters: Of the worker's partitions; a tied one once.
        gradients: Of these parameters.
        optimizer: State of the optimizer.
        buffers: Such as running statistics.
        activations: What is kept for backward, over all micro-batches in flight.
        workspace: The largest that one of its partitions needs while it computes.
        messages: On their way to or from the worker.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    buffers: float = 0
    activations: float = 0
    workspace: float = 0
    messages: float = 0

    @property
    def total(self) -> float:
        """The peak, in bytes."""
        return (
            self.parameters + self.gradients + self.optimizer + self.buffers
            + self.activations + self.workspace + self.messages
        )  # fmt: skip


@dataclass(frozen=True)
class WorkerPrediction:
    """How one worker spends a step. The three times add up to the step time.

    Args:
        worker: The worker's name.
        compute_s: Forward, backward, recompute and update.
        transfer_s: Not computing while a message to or from the worker is on its way.
        idle_s: The rest.
        memory: The peak, by what it holds.
        peak_bytes: The peak.
        capacity_bytes: The worker's memory less its reserve.
        forward_s: The part of compute_s that is forward.
        update_s: The part of compute_s that is the optimizer's update, once a step.
        busy_s: The part of transfer_s and idle_s in which handling messages keeps the worker from computing.
    """

    worker: Name
    compute_s: float
    transfer_s: float
    idle_s: float
    memory: Memory
    peak_bytes: float
    capacity_bytes: float
    forward_s: float | None = None
    update_s: float | None = None
    busy_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the worker has the memory for the peak."""
        return has_room(self.peak_bytes, self.capacity_bytes)

    @property
    def occupied_s(self) -> float:
        """Seconds in which the worker cannot do more: it computes, or is kept busy by messages."""
        return self.compute_s + (self.busy_s or 0.0)


@dataclass(frozen=True)
class TransferPrediction:
    """All messages of a step over one link.

    Args:
        source: The worker that sends.
        target: The worker that receives.
        bytes: Of all of them.
        seconds: In which the link is in use.
    """

    source: Name
    target: Name
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of a plan.

    Args:
        step_s: The time of one step, in seconds.
        samples_per_s: Batch size by step time.
        bubble_fraction: The share of the step, over the workers used, in which a worker does not compute.
        workers: How each worker spends the step.
        transfers: The messages, by link.
    """

    step_s: StepTime
    samples_per_s: float
    bubble_fraction: Share
    workers: tuple[WorkerPrediction, ...]
    transfers: tuple[TransferPrediction, ...]


def check_prediction(predicted: Prediction | None) -> None:
    """Raise FormatError if of a worker or a link two things are predicted."""
    if predicted is not None:
        check_unique([each.worker for each in predicted.workers], "predicted.workers[{}].worker")
        links = [f"{each.source} -> {each.target}" for each in predicted.transfers]
        check_unique(links, "predicted.transfers[{}]")
