"""What a worker holds of one step between its actions: values, their gradients, and what waits to be sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from assigner.errors import UsageError
from assigner.model.marking import Value
from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.stages.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.model.marking import Piece

Key = tuple[Value, int]
"""A value of one micro-batch."""
Facts = tuple[bool, int, tuple[int, ...], tuple[int, ...]]
"""What a forward can change of a value that it reads: `facts_of`."""


class Output(NamedTuple):
    """An output of a partition that others read.

    Args:
        value: Which.
        gradient: A gradient comes back for it.
        joined: How many partitions that its maker is joined with read it, with its graph.
        asked: Code behind it looks whether it requires a gradient.
    """

    value: Value
    gradient: bool
    joined: int
    asked: bool


@dataclass(frozen=True)
class Neighbours:
    """Partitions of a stage that are joined, in the stage's order.

    Args:
        names: They; one alone is joined with none.
        state: What their forwards may write, of all of them; None: one alone that cannot be joined.
        outputs: What each of them makes for others, joined ones or not.
        without_gradient: What they read of other partitions and give no gradient back for.
    """

    names: tuple[str, ...]
    state: PartitionState | None
    outputs: Mapping[str, Sequence[Output]]
    without_gradient: Sequence[Value]


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
        joined: By stage and micro-batch, the stage's partitions as its forward has joined them.
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
    joined: dict[tuple[int, int], list[Neighbours]] = field(default_factory=dict)
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


def facts_of(tensor: torch.Tensor) -> Facts:
    """What a forward can change of a tensor so that others with the same values do not see it."""
    return tensor.requires_grad, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def check_unchanged(piece: Piece, tensor: torch.Tensor, before: Facts) -> None:
    """Look at a value that others read elsewhere, when the forward of a joined partition has read it.

    What a partition does to it would differ from plan to plan: those that are joined have one tensor for a value, those
    elsewhere one of their own, with the part of its gradient that comes from there.

    Raises:
        UsageError: it is no longer what it was, as behind `x.detach_()` or `x.data = ...`.
    """
    if facts_of(tensor) != before:
        raise UsageError(
            f"the forward of partition {piece.name!r} changes a value that it reads in its shape or its memory, or in"
            " whether it has a gradient (detach_, set_, resize_, .data =): others that read the value have their own",
            hint="change a value of the partition's own: x = x.detach()",
        )


def check_hooks(piece: Piece, reads: Sequence[torch.Tensor]) -> None:
    """Look at the values that a forward has read which has hooked on to tensors.

    Args:
        piece: The partition.
        reads: What it has read.

    Raises:
        UsageError: it has hooked on to one that another partition has made: the hook would see the part of its gradient
            that comes from here, and twice where the forward runs again.
    """
    for value, tensor in zip(piece.reads, reads, strict=True):
        if value.partition and tensor._backward_hooks:
            raise UsageError(
                f"the forward of partition {piece.name!r} hooks on to output {value.index} of partition"
                f" {value.partition!r}: the hook would not act once on the whole gradient",
                hint="hook on to it where it is made; or on a value of the partition's own, as x = x * 1",
            )
