"""A placement that was made by a simple rule, before it is priced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimplePlacement:
    """A placement at one micro-batch count.

    Args:
        micro_batches: M.
        stages: (worker, partitions) of each stage in pipeline order.
        replicas: (worker, micro-batches) of those that share the only stage; empty: every stage has one worker.
    """

    micro_batches: int
    stages: tuple[tuple[str, tuple[str, ...]], ...]
    replicas: tuple[tuple[str, int], ...] = ()

    @property
    def held(self) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """(worker, partitions, micro-batches) of every worker of every stage."""
        if not self.replicas:
            return tuple((worker, names, self.micro_batches) for worker, names in self.stages)
        ((_, names),) = self.stages
        return tuple((worker, names, share) for worker, share in self.replicas)
