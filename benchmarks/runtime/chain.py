"""A workload's model as a chain of stages: one plan for the runtime, the same modules for everybody else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

import assigner
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Replica, Stage
from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.terms import Schedule
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Batch, Workload


@dataclass(frozen=True)
class Chain:
    """A workload cut into `ranks` stages of as many partitions each.

    Args:
        entry: The workload.
        micro_batches: Equal parts of its batch.
        ranks: Stages.
    """

    entry: str
    micro_batches: int
    ranks: int

    @cached_property
    def workload(self) -> Workload:
        """The workload."""
        return assigner.load_workload(self.entry)

    @cached_property
    def graph(self) -> PartitionGraph:
        """Its partitions."""
        return partition_graph(self.workload)

    @cached_property
    def batch(self) -> Batch:
        """The batch of every step."""
        return self.workload.make_batch(self.workload.batch_size, seed=1)

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The partitions of each stage."""
        every = [piece.name for piece in self.graph.pieces]
        cuts = [len(every) * rank // self.ranks for rank in range(self.ranks + 1)]
        return tuple(tuple(every[low:high]) for low, high in itertools.pairwise(cuts))

    def plan(self, schedule: Schedule, *, workers: int | None = None) -> Plan:
        """The stages on `workers` ranks (one each, or all on one), one thread a rank, nothing rematerialised."""
        return self._plan(
            schedule,
            *(
                Stage(f"worker:{rank if workers is None else 0}/cpu", names, threads=1)
                for rank, names in enumerate(self.names)
            ),
        )

    def shared_plan(self) -> Plan:
        """All partitions as one stage that all ranks share, each with as many micro-batches."""
        assert not self.micro_batches % self.ranks
        share = self.micro_batches // self.ranks
        workers = tuple(Replica(f"worker:{rank}/cpu", share, threads=1) for rank in range(self.ranks))
        return self._plan("1f1b", Stage(None, tuple(itertools.chain(*self.names)), replicas=workers))

    def _plan(self, schedule: Schedule, *stages: Stage) -> Plan:
        size = self.workload.batch_size // self.micro_batches
        assert size * self.micro_batches == self.workload.batch_size  # the peers want equal parts
        reference = WorkloadReference(self.workload.name, self.entry, self.graph.fingerprint, self.workload.batch_size)
        return Plan(
            workload=reference, schedule=schedule, micro_batches=self.micro_batches, micro_batch_size=size,
            stages=stages,
        )  # fmt: skip

    def modules(self, ranks: Sequence[int]) -> Stages:
        """The partitions of some stages, with the weights that the runtime gives them."""
        torch.manual_seed(self.workload.seed)
        model = self.workload.model()
        return Stages({name: model.get_submodule(name) for rank in ranks for name in self.names[rank]})


class Stages(nn.Sequential):
    """Partitions, one after the other, that know their names in the model."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(*modules.values())
        self.names = tuple(modules)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Every parameter's gradient, by the parameter's name in the model."""
        return {
            f"{name}.{parameter}": each.grad
            for name, module in zip(self.names, self, strict=True)
            for parameter, each in module.named_parameters()
            if each.grad is not None
        }


def unpipelined(chain: Chain) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole model in this process, one micro-batch after the other."""
    stages = chain.modules(range(chain.ranks))
    total = 0.0
    cuts = (each.chunk(chain.micro_batches) for each in chain.batch)
    for inputs, targets in zip(*cuts, strict=True):
        loss = chain.workload.loss(stages(inputs), targets) / chain.micro_batches
        loss.backward()
        total += float(loss.detach())
    return total, stages.gradients()
