"""What a worker holds of one step between its actions: values, their gradients, and what waits to be sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from assigner.model.marking import Value
from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.stages.reduction import Reduction
from assigner.runtime.step.joined import Island

if TYPE_CHECKING:
    from collections.abc import Iterable

Key = tuple[Value, int]
"""A value of one micro-batch."""


@dataclass
class StepValues:
    """Of one step.

    Args:
        number: The batch's number in training.
        micro_batches: The batch, cut.
        places: Their numbers in the whole batch.
        counts: How many partitions of this rank read a value in the step.
        leaves: The values that partitions of this rank read, by value and micro-batch; their gradients are in `.grad`.
        readers: How many backwards of this rank still need a leaf.
        gradients: Gradients that came from other ranks.
        outbox: What the last forward made for others.
        islands: By stage and micro-batch, what its forward has run, in the stage's order.
        reduction: Adds up the gradients of stages that several workers share; None: not before the step's end.
        shapes: Of what this rank has sent, where shapes depend on data; the gradients have the same.
    """

    number: int
    micro_batches: Sequence[MicroBatch]
    places: Sequence[int]
    counts: Counter[Key]
    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)
    readers: Counter[Key] = field(default_factory=Counter)
    gradients: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    outbox: dict[Key, torch.Tensor] = field(default_factory=dict)
    islands: dict[tuple[int, int], list[Island]] = field(default_factory=dict)
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    reduction: Reduction | None = None

    def keep(self, key: Key, tensor: torch.Tensor, *, differentiable: bool, readers: int) -> None:
        """Make a value a leaf, for the partitions of this rank that read it and have it from nowhere else.

        Args:
            key: Which value.
            tensor: It; of this rank's own, it requires a gradient as its forward left it.
            differentiable: A gradient comes back for it.
            readers: How many such partitions there are; there is one at least.
        """
        self.leaves[key] = tensor.detach().requires_grad_(differentiable)
        self.readers[key] = readers

    def read(self, keys: Iterable[Key]) -> None:
        """Each of these leaves has had one of its readers; behind the last one it goes."""
        for key in keys:
            self.readers[key] -= 1
            if not self.readers[key]:
                del self.leaves[key]

    def gradient(self, key: Key) -> torch.Tensor | None:
        """The gradient of a value that this rank made: of its readers here, and of those elsewhere."""
        leaf, total = self.leaves.pop(key, None), None
        if leaf is not None:
            total = leaf.grad
        for part in self.gradients.pop(key, ()):
            total = part if total is None else total + part
        return total
