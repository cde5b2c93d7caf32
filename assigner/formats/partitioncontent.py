"""What a partition holds, by the names of modules and tensors in the model: for tools that know only the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PartitionContent:
    """What a partition holds, by its names in the model.

    Args:
        modules: Those whose forward it runs, its own and unmarked ones beside it.
        tensors: Parameters and buffers that it reads itself, which belong to a module around it.
        meetings: Partitions whose values it puts together in one operation outside of all modules (`x + y`); "" stands
            for the model's inputs.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    meetings: tuple[frozenset[str], ...] = ()


ModelContent = Mapping[str, PartitionContent]
"""What each partition holds, by its name; under "" what no partition uses."""
