"""A placement that was made by a simple rule, before it is priced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimplePlacement:
    """A placement at one micro-batch count.

    Args:
        micro_batches: M.
        stages: (worker, partitions) of each stage in pipeline order.
    """

    micro_batches: int
    stages: tuple[tuple[str, tuple[str, ...]], ...]
