"""A small reference measurement: how fast a machine does three fixed pieces of work that no model changes.

A profile has it of each worker, and a trace of each worker that it is of. Where the two differ the machine has changed,
not the model's price: `assigner simulate --against` tells the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceTimes:
    """Seconds of fixed pieces of work, each the mean over a while.

    Args:
        compute_s: A product of matrices on the worker's device.
        memory_s: Copies in the device's memory: of a GPU larger than its caches, of a CPU larger than those of a core.
        message_s: A message of a MiB through this host's kernel, sent and received by one thread.
    """

    compute_s: float
    memory_s: float
    message_s: float

    def together(self, other: ReferenceTimes) -> ReferenceTimes:
        """The means of this one and another, as of the start and the end of a run."""
        return ReferenceTimes(
            (self.compute_s + other.compute_s) / 2,
            (self.memory_s + other.memory_s) / 2,
            (self.message_s + other.message_s) / 2,
        )
