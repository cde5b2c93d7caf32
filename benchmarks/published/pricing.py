"""What a run's plan takes by this program's cost model and simulator, and the one constant that is fitted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.stage import Replica, Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import step_s, worker_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sailor import Measured, Node


@dataclass(frozen=True)
class Price:
    """A plan as it is priced.

    Args:
        step_s: Of a step.
        reduce_s: Of the longest all-reduce of a stage's gradients in it.
        tensor_bytes: On the fullest GPU.
        spare_bytes: What the GPU with the least room has beside its tensors and the reserve; below 0: they do not fit.
    """

    step_s: float
    reduce_s: float
    tensor_bytes: float
    spare_bytes: float


class Groups:
    """Nodes in pipeline order, with the replicas of each stage side by side; all replicas do equal work.

    Args:
        measured: The authors' profile.
        groups: The nodes of each stage; replica k of a stage exchanges messages with replica k of the next.
        micro_batch_size: In samples.
        micro_batches: Of each replica in a step.
        reserve: Bytes of each GPU that its tensors cannot have.
    """

    def __init__(
        self,
        measured: Measured,
        groups: Sequence[Sequence[Node]],
        *,
        micro_batch_size: int,
        micro_batches: int,
        reserve: float = 0.0,
    ) -> None:
        self._size, self._each, self._total = micro_batch_size, micro_batches, micro_batches * len(groups[0])
        self.profile = measured.profile(groups, batch_size=micro_batch_size * self._total, reserve=reserve)
        self.cost = CostModel(self.profile)
        self._gpus = dict(zip(self.profile.worker, (node.gpus for group in groups for node in group), strict=True))
        names = iter(self.profile.worker)
        self._stages = [tuple(next(names) for _ in group) for group in groups]

    def plan(self, cuts: Sequence[int]) -> Plan:
        """1F1B with so many layers on each stage."""
        names = iter(self.profile.order)
        return Plan(
            workload=self.profile.workload,
            schedule="1f1b",
            micro_batches=self._total,
            micro_batch_size=self._size,
            stages=tuple(
                self._stage(workers, tuple(next(names) for _ in range(layers)))
                for workers, layers in zip(self._stages, cuts, strict=True)
            ),
        )

    def _stage(self, workers: Sequence[str], partitions: tuple[str, ...]) -> Stage:
        if len(workers) == 1:
            return Stage(workers[0], partitions)
        return Stage(None, partitions, replicas=tuple(Replica(name, self._each) for name in workers))

    def price(self, cuts: Sequence[int]) -> Price:
        """What so many layers on each stage cost."""
        plan = self.plan(cuts)
        held = {name: worker_memory(self.cost, plan, name).total for name in plan.workers}
        room = {name: self.profile.worker[name].capacity_bytes - size for name, size in held.items()}
        return Price(
            step_s(plan, self.cost),
            max(
                self.cost.reduce_s(stage.workers, self.cost.state(stage.partitions).gradients) for stage in plan.stages
            ),
            max(size / self._gpus[name] for name, size in held.items()),
            min(size / self._gpus[name] for name, size in room.items()),
        )


def left_out(residues: Sequence[float]) -> list[float]:
    """For each residue the median of the others: a constant fitted without the run that it is tried on."""
    return [statistics.median([*residues[:n], *residues[n + 1 :]]) for n in range(len(residues))]
