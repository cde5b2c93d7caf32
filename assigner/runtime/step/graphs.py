"""What is kept of a micro-batch's forward for its backward, and the backward through it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from assigner.model.deferred.memento import Memento
from assigner.model.singleprocess import as_single_process
from assigner.runtime.forward.heldtensors import HeldTensor
from assigner.runtime.forward.splitbackward import WeightPart
from assigner.runtime.step.backward import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from assigner.runtime.step.partition import PartitionRunner


NOTHING = contextlib.nullcontext()


class ForwardPlace(NamedTuple):
    """Which forward this is: the randomness and the micro-batch belong to it.

    Args:
        seed: The workload's seed.
        step: The batch's number in training.
        micro_batch: The micro-batch's number.
        last: It is the step's last one.
    """

    seed: int
    step: int
    micro_batch: int
    last: bool = False

    @property
    def is_alone(self) -> bool:
        """No other forward of its partitions comes between this one and its backward."""
        return self.last and self.micro_batch == 0


@dataclass(slots=True)
class Graph:
    """What the backward of a micro-batch needs.

    Args:
        roots: Where it starts, for each output; empty once its input part has run.
        held: Tensors that forwards write, as this one left them.
        is_hooked: The forward has hooked on to tensors.
        overwritten: A partition and the name of its tensor that a later forward wrote without a copy of it.
        values: Python values that forwards change, as this one left them, where its backward may read them.
        rest: What the input part has left to the weight part; None: it has not run.
        entries: Where its backward comes into each of its partitions, if somebody may ask.
        draws: Code that is not torch's own may run in its backward, and draw.
    """

    roots: list[GradientEdge | None]
    held: list[HeldTensor]
    is_hooked: bool = False
    overwritten: tuple[str, str] | None = None
    values: list[Memento] = field(default_factory=list)
    rest: WeightPart | None = None
    entries: list[set[Node]] = field(default_factory=list)
    draws: bool = False


Graphs = dict[tuple[tuple[str, ...], int], Graph]
"""Those under way on a rank, by their partitions and micro-batch."""


def given(
    graph: Graph, output_gradients: Sequence[torch.Tensor | None]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Where a backward starts, and with what."""
    pairs = zip(graph.roots, output_gradients, strict=True)
    both = [(root, gradient) for root, gradient in pairs if root is not None and gradient is not None]
    return [root for root, _ in both], [gradient for _, gradient in both]


def differentiate(
    graph: Graph, output_gradients: Sequence[torch.Tensor | None], runners: Sequence[PartitionRunner], micro_batch: int
) -> None:
    """A backward through the partitions whose graph this is: those that have statistics know of it."""
    roots, gradients = given(graph, output_gradients)
    if not roots:
        return
    counting = [each.statistics for each in runners if each.statistics is not None]
    for statistics in counting:
        statistics.backward_of = micro_batch
    with as_single_process(), NOTHING if graph.overwritten is None else in_words(graph.overwritten):
        # what torch.autograd.backward calls, without its checks of what a user gives
        _engine_run_backward(
            tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    for statistics in counting:
        statistics.end_backward()
