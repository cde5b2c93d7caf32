"""A training step through the graphs that its micro-batches need: nearly always the plan's own, and one program."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from assigner.runtime.step.executor import Executor
from assigner.runtime.step.loss import check_groups
from assigner.runtime.step.outputs import BatchOutputs
from assigner.runtime.step.results import added, nothing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.model.workload import Workload
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.runtime.batch.needs import Needs
    from assigner.runtime.batch.recurrence import CarriedState
    from assigner.runtime.batch.variants import Variant, Variants
    from assigner.runtime.forward.remat import Rematerialisation
    from assigner.runtime.forward.state import PartitionState
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.reduction import Reduction
    from assigner.runtime.stages.replicas import ReplicaWatch
    from assigner.runtime.step.batchnorm import DeferredStatistics
    from assigner.runtime.step.outputs import Receiver
    from assigner.schedule.program import Program


class Training:
    """The forwards and backwards of this rank.

    Args:
        variants: The model's graphs.
        member: This process in the run.
        workload: The loss and the seed.
        remat: What keeps no graph and runs its forward again.
        statistics: Of BatchNorm modules.
        states: What forwards change beside their outputs, by partition.
        needs: What this rank needs of a batch.
        carried: The state that goes from batch to batch.
        watch: Of what steps change in stages that several workers share.

    Attributes:
        executor: Runs the plan's own graph.
        as_planned: The last step did what the plan says and nothing else: its program's actions, through one graph.
            Micro-batches of one row have a graph of their own, mostly with the same actions.
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
        needs: Needs,
        carried: CarriedState,
        watch: ReplicaWatch,
    ) -> None:
        self.variants, self.member, self.workload = variants, member, workload
        self.remat, self.statistics, self.states = remat, statistics, states
        self.needs, self.carried, self.watch = needs, carried, watch
        self._executors: WeakKeyDictionary[Variant, Executor] = WeakKeyDictionary()
        self.executor = self._executor(variants.planned)
        self.as_planned = True
        self._running = self.executor

    def _executor(self, variant: Variant) -> Executor:
        if variant not in self._executors:
            self._executors[variant] = Executor(
                variant.graph, variant.modules, self.member, self.workload,
                remat=self.remat, statistics=self.statistics, states=self.states,
                carried=self.carried.sources(variant.graph),
            )  # fmt: skip
        return self._executors[variant]

    def run(
        self,
        program: Program,
        micro_batches: Sequence[MicroBatch],
        number: int,
        *,
        loss_factor: float,
        outputs_to: Receiver | None = None,
        reduction: Reduction | None = None,
    ) -> tuple[dict[int, list[float]], BatchOutputs | None]:
        """Run all micro-batches of a step forward and backward; gradients add up in the parameters.

        Args:
            program: The plan's own, for so many micro-batches.
            micro_batches: The batch, cut.
            number: The batch's number in training.
            loss_factor: What the loss's gradient is multiplied by.
            outputs_to: Who wants the model's outputs; None: nobody.
            reduction: Adds up the gradients of stages that several workers share; it begins here where the step runs
                one graph alone, with the plan's actions.

        Returns:
            By the ranks that make the model's output their numbers (see `step.results`), and the outputs.
        """
        groups = self.variants.groups(self.carried.given_to(micro_batches), training=True)
        check_groups(self.workload, groups)
        self.carried.bring(groups)
        self.needs.check_groups(groups, loss=True)
        programs = [group.variant.programs.counted(len(group.places), training=True) for group in groups]
        self.as_planned = len(groups) == 1 and programs[0].actions == program.actions
        found: dict[int, list[float]] = {}
        outputs = None if outputs_to is None else BatchOutputs(groups, self.workload, self.variants.plan, outputs_to)
        self.watch.begin(training=True)
        for group, mine in zip(groups, programs, strict=True):
            self._running = self._executor(group.variant)
            self._running.recorder = self.executor.recorder
            numbers = self._running.run(
                mine, group.micro_batches, number, places=group.places, loss_factor=loss_factor, outputs=outputs,
                reduction=reduction if self.as_planned else None,
            )  # fmt: skip
            for rank in group.variant.makers:
                found[rank] = added(found.get(rank) or nothing(self.workload), numbers)
        self.carried.keep([(group, self._executor(group.variant).made) for group in groups])
        self.watch.end()
        self.member.at = "the exchange of BatchNorm statistics"
        self.member.before_sums()
        self.statistics.exchange(len(micro_batches))
        self.statistics.commit()
        for group in groups:
            self._executor(group.variant).stores.commit()
        return found, outputs

    def forget(self) -> None:
        """Drop what an unfinished step holds."""
        self._running.forget()
        self.watch.forget()
