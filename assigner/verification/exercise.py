"""What both sides of the comparison are given: the same small batches, cut as a run cuts them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from assigner.formats.fineness import micro_batch_count
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage
from assigner.model.marking import PartitionGraph
from assigner.model.marking.writing import ONCE
from assigner.model.workload import Workload
from assigner.runtime.batch.microbatch import Cutting, MicroBatch, check_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.model.workload import Batch, Metric

STEPS = 2


@dataclass(frozen=True, eq=False)
class Exercise:
    """The steps that both sides make.

    Args:
        workload: The model with its loss and optimizer; not compiled.
        graph: Its partitions.
        rows: In a batch.
        micro_batches: Of a batch.
    """

    workload: Workload
    graph: PartitionGraph
    rows: int
    micro_batches: int

    @property
    def trains(self) -> bool:
        """Whether the model is trained, and not used for its outputs alone."""
        return self.workload.loss is not None and self.workload.optimizer is not None

    @property
    def epsilon(self) -> float:
        """The relative step between neighbouring numbers of the type that autocast computes in; 0: no autocast."""
        autocast = self.workload.autocast
        return torch.finfo(getattr(torch, autocast)).eps if autocast else 0.0

    @cached_property
    def _cutting(self) -> Cutting:
        return Cutting(self.workload)

    @cached_property
    def _batches(self) -> list[Batch]:
        made = [self.workload.make_batch(self.rows, self.workload.seed + step) for step in range(STEPS)]
        for batch in made:
            check_pair(batch)
        return made

    def batch(self, step: int) -> Batch:
        """A copy of a step's batch that shares nothing with other copies; tensors that stand twice in it stay one."""
        return copy.deepcopy(self._batches[step])

    def own_loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """The loss for one side: a module or an object may remember what it was called with. None: there is none."""
        return copy.deepcopy(self.workload.loss)

    def own_metrics(self) -> dict[str, Metric]:
        """The metrics for one side, likewise."""
        return copy.deepcopy(dict(self.workload.metrics or {}))

    def cut(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a copy of a step's batch."""
        batch = self.batch(step)
        count = micro_batch_count(
            self._cutting.row_count(batch[0]), self.micro_batches, self._size, self.workload.fineness
        )
        return self._cutting.split(batch, count)

    @property
    def _size(self) -> int:
        return -(-self.rows // self.micro_batches)

    def stored_once(self) -> list[str]:
        """Names of what the forward stores into once a step, in whatever graph was captured until now."""
        graphs = (self.graph, *self.graph.recuts[True], *self.graph.recuts[False])
        nodes = (node for graph in graphs for piece in graph.pieces for node in piece.graph.nodes)
        return sorted({str(node.all_input_nodes[0].target) for node in nodes if node.target in ONCE})

    def whole(self) -> Exercise:
        """The same with one micro-batch."""
        return replace(self, micro_batches=1)

    def exact(self) -> Exercise:
        """The same without autocast."""
        return replace(self, workload=replace(self.workload, autocast=None))

    def plan(self, *, recomputes: bool) -> Plan:
        """A plan that gives each partition a worker of its own.

        All micro-batches are in flight everywhere, and backwards come in the order of the plain side, whose sums have
        the same bits then: a loop's, or that of autograd where one loss is over the batch.

        Args:
            recomputes: Every partition rematerialises, but those whose mark says "never".
        """
        stages = tuple(
            Stage(
                f"worker:{n}/cpu",
                (piece.name,),
                (piece.name,) if recomputes and piece.mark.rematerialise != "never" else (),
                in_flight=self.micro_batches,
            )
            for n, piece in enumerate(self.graph.pieces)
        )  # fmt: skip
        return Plan(
            workload=WorkloadReference(self.workload.name or "check", batch_size=self.rows),
            schedule="gpipe" if self.workload.loss_over == "batch" else "1f1b",
            micro_batches=self.micro_batches,
            micro_batch_size=self._size,
            stages=stages,
        )
