"""A training step through the graphs that its micro-batches need: nearly always the plan's own, and one program."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from assigner.location import Location
from assigner.runtime.executor import Executor
from assigner.runtime.loss import check_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.runtime.batchnorm import DeferredStatistics
    from assigner.runtime.membership import Membership
    from assigner.runtime.microbatch import MicroBatch
    from assigner.runtime.remat import Rematerialisation
    from assigner.runtime.state import PartitionState
    from assigner.runtime.variants import Variant, Variants
    from assigner.schedule import Program
    from assigner.workload import Workload


class Training:
    """The forwards and backwards of this rank.

    Args:
        variants: The model's graphs.
        member: This process in the run.
        workload: The loss and the seed.
        remat: What keeps no graph and runs its forward again.
        statistics: Of BatchNorm modules.
        states: What forwards change beside their outputs, by partition.

    Attributes:
        executor: Runs the plan's own graph.
        as_planned: The last step ran the plan's own graph and nothing else.
    """

    def __init__(
        self,
        variants: Variants,
        member: Membership,
        workload: Workload,
        *,
        remat: Rematerialisation,
        statistics: DeferredStatistics,
        states: Mapping[str, PartitionState],
    ) -> None:
        self.variants, self.member, self.workload = variants, member, workload
        self.remat, self.statistics, self.states = remat, statistics, states
        self._executors: WeakKeyDictionary[Variant, Executor] = WeakKeyDictionary()
        self.executor = self._executor(variants.planned)
        self.as_planned = True
        self._running = self.executor

    def _executor(self, variant: Variant) -> Executor:
        if variant not in self._executors:
            self._executors[variant] = Executor(
                variant.graph, variant.modules, self.member, self.workload,
                remat=self.remat, statistics=self.statistics, states=self.states,
            )  # fmt: skip
        return self._executors[variant]

    def run(
        self, program: Program, micro_batches: Sequence[MicroBatch], number: int, *, loss_factor: float
    ) -> dict[int, float]:
        """Run all micro-batches of a step forward and backward; gradients add up in the parameters.

        Args:
            program: The plan's own, for so many micro-batches.
            micro_batches: The batch, cut.
            number: The batch's number in training.
            loss_factor: What the loss's gradient is multiplied by.

        Returns:
            By the ranks that make the model's output: the loss there.
        """
        groups = self.variants.groups(micro_batches, training=True)
        check_groups(self.workload, groups)
        self.as_planned = len(groups) == 1 and groups[0].variant.is_planned
        losses: dict[int, float] = defaultdict(float)
        for group in groups:
            whole = len(group.places) == len(micro_batches) and group.variant.is_planned
            mine = program if whole else group.variant.programs.counted(len(group.places), training=True)
            self._running = self._executor(group.variant)
            losses[Location.parse(group.variant.last_worker).rank] += self._running.run(
                mine, group.micro_batches, number, places=group.places, loss_factor=loss_factor
            )
        self.statistics.commit()
        for group in groups:
            self._executor(group.variant).stores.commit()
        return losses

    def forget(self) -> None:
        """Drop what an unfinished step holds."""
        self._running.forget()
