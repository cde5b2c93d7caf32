"""All that a rank has set up to execute one plan; another plan gets another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.formats.orders import INPUT
from assigner.machine.launchedrank import launched
from assigner.runtime.batch.callcomparison import CallComparison
from assigner.runtime.batch.microbatch import Cutting, MicroBatch
from assigner.runtime.batch.needs import Needs, given_pair
from assigner.runtime.batch.recurrence import CarriedState
from assigner.runtime.batch.variants import Variants
from assigner.runtime.forward.nodes import count_retained
from assigner.runtime.forward.state import PartitionState, WrittenTensors
from assigner.runtime.passes import BatchPasses
from assigner.runtime.ranks.process import settle_vector_maths
from assigner.runtime.recording.memory import settle_heap
from assigner.runtime.stages.gathering import Gathering
from assigner.runtime.stages.localpartitions import LocalPartitions, UnreadState
from assigner.runtime.stages.replicas import ReplicaWatch, replicated
from assigner.runtime.stages.updaters import updating_ranks
from assigner.runtime.step.batchnorm import DeferredStatistics
from assigner.runtime.step.executor import Training
from assigner.runtime.step.gradients import Gradients
from assigner.runtime.step.results import shared_result
from assigner.runtime.update.sparsemomentum import fit_momentum
from assigner.schedule.replication import is_exchanged, tie_holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Batch, Workload
    from assigner.runtime.forward.remat import Rematerialisation
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.step.batchnorm import BatchNorm
    from assigner.runtime.step.outputs import Receiver
    from assigner.runtime.step.results import StepResult
    from assigner.runtime.update.rankoptimizer import RankOptimizer
    from assigner.runtime.update.scaling import GradientScaling
    from assigner.schedule.program import Program


class Installation:
    """A rank's partitions under a plan, and what runs them.

    Attributes:
        trained: Their parameters that are trained.
        updated: Those of them that this rank updates, for other workers too where the plan says so.
        written: The tensors that forwards write, as far as that is learnt.
        training: Forwards and backwards.
        executor: What runs the plan's own graph in training.
        inference: Forwards alone.
        updating: The ranks that update something that is trained, in the plan's order, and what.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        graph: PartitionGraph,
        member: Membership,
        *,
        remat: Rematerialisation,
        batch_norm: BatchNorm,
        trains: bool,
        scaling: GradientScaling,
        unread: UnreadState,
    ) -> None:
        settle_vector_maths()
        room = None
        if member.device.type == "cpu":
            needed, place = plan.predicted_workers.get(member.worker or ""), launched()
            known = (0.0, 0.0) if needed is None else (needed.peak_bytes, needed.capacity_bytes)
            room = settle_heap(*known, sharing=(place and place.local_ranks) or 1)
        if any(step.letter == INPUT for steps in plan.listed.values() for step in steps):
            count_retained()
        self.graph = graph
        self.share = LocalPartitions(graph, plan, member.worker, member.device, unread)
        for partition in () if trains else self.share.partitions:
            self.share.freeze(partition, self.share.parameters_of(partition))
        self.trained: dict[str, nn.Parameter] = self.share.parameters if trains else {}
        self.updated = {name: each for name, each in self.trained.items() if name in self.share.updated}
        self.plan, self.member = plan, member
        member.open_groups(tie_holders(plan, tie) for tie in graph.ties if is_exchanged(plan, tie))
        self.watch = ReplicaWatch(self.share, workload, member)
        groups = {name: member.groups[workers] for name, workers in replicated(plan, self.share.partitions).items()}
        statistics = DeferredStatistics(self.share.modules, batch_norm, groups)
        variants = Variants(graph, plan, self.share.modules, member, trained=self.trained, unread=unread.lend)
        self.written = WrittenTensors(self.share.modules.values(), self.share.held_elsewhere())
        states = {name: PartitionState(module, self.written) for name, module in self.share.modules.items()}
        self.needs = Needs(workload, variants, member)
        self.cutting, self.comparison = Cutting(workload), CallComparison(member, self.needs, plan.micro_batches)

        def passes(training: Training | None) -> BatchPasses:
            carried = CarriedState(workload.carried, cutting=self.cutting, planned=graph.output, member=member)
            return BatchPasses(
                variants, member, workload, needs=self.needs, carried=carried, watch=self.watch, room=room,
                training=training,
            )  # fmt: skip

        self.training, self.inference = passes(Training(remat, statistics, states)), passes(None)
        self.executor = self.training.executor(variants.planned)
        self.gradients = Gradients(self.trained, graph, plan, member, scaling)
        self.gathering = Gathering(self.share, member)
        self.updating = updating_ranks(graph, plan)
        member.on_leaving = self.forget

    def check_idle(self) -> None:
        """Refuse a batch in the middle of another one, whose values would be in its place.

        Raises:
            UsageError: a loss has called the pipeline that has called it, on the only rank (else see `one_call`).
        """
        if not (self.training.is_idle and self.inference.is_idle):
            raise UsageError(
                "the model, its loss or a metric calls its own pipeline in the middle of a batch",
                hint="call it in the script, between two steps, and hand over with the batch what it gives",
            )

    def begin(self, call: str, batch: Batch | None) -> tuple[Program, list[MicroBatch]]:
        """The program for a training batch, and the batch cut for it.

        Raises:
            UsageError: another rank makes another call or has another batch, this one lacks what it needs, the batch
                cannot be used, or gradients are off; or, before the first step, the script has given the workers of a
                stage unlike weights.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step was called under torch.no_grad() or torch.inference_mode(): it would train nothing",
                hint="call it outside of that block; pipeline.evaluate and pipeline.forward need no such block",
            )
        micro_batches = self._cut(call, given_pair(batch))
        self.watch.check_first()
        return self.training.variants.planned.program(len(micro_batches), training=True), micro_batches

    def _cut(self, call: str, batch: tuple[Any, Any], *, loss: bool = True) -> list[MicroBatch]:
        """A batch of which all ranks have the same, as micro-batches; `loss`: of its targets, too."""
        self.graph.check_read()
        weigh = self.cutting.weigher(self.plan) if loss else None
        inputs, targets, weights = self.comparison.given(call, batch, loss=loss, weigh=weigh)
        count = self.cutting.count(self.cutting.row_count(inputs), self.plan)
        return self.cutting.split((inputs, targets), count, weighed=loss, weights=weights)

    def check_read_elsewhere(self) -> None:
        """Behind a forward: it has not begun to change what code outside of its partition reads.

        Raises:
            MarkingError: it has.
        """
        self.share.read_elsewhere.check(self.training.variants.read_elsewhere)

    def evaluate(self, call: str, batch: Batch | None, number: int, outputs_to: Receiver | None = None) -> StepResult:
        """The loss and the metrics over a batch; see `Pipeline.evaluate`."""
        found, outputs = self.inference.run(self._cut(call, given_pair(batch)), number, outputs_to=outputs_to)
        self.check_read_elsewhere()
        result = shared_result(found, self.inference.workload, self.member, training=False)
        if outputs is not None:
            result.outputs = outputs.carry(self.member)
        return result

    def forward(self, inputs: Any, number: int, to: int | None) -> Any:
        """The model's output on rank `to`; see `Pipeline.forward`."""
        micro_batches = self._cut(f"forward(to={to})", given_pair((inputs, None)), loss=False)
        _, outputs = self.inference.run(micro_batches, number, loss=False, outputs_to="all" if to is None else to)
        self.check_read_elsewhere()
        assert outputs is not None
        return outputs.carry(self.member)

    def go_on_from(self, other: Installation) -> None:
        """Take over the state that goes from batch to batch from what ran another plan."""
        self.watch.go_on_from(other.watch)
        self.training.carried.parts = other.training.carried.parts
        self.inference.carried.parts = other.inference.carried.parts

    @property
    def updated_elsewhere(self) -> dict[str, nn.Parameter]:
        """The trained parameters of this rank that another worker updates for it."""
        return {name: each for name, each in self.trained.items() if name not in self.updated}

    def update(self, optimizer: RankOptimizer, number: int, *, good: bool) -> None:
        """Apply the gradients where they are `good`, and hand each other what workers have updated for others."""
        applied = optimizer.applied if good else None
        if applied is not None:
            fit_momentum(applied)
        self.executor.update(applied, number, optimizer.around(applied, self.member.device) if good else None)
        if good and self.plan.is_divided:
            self.member.before_sums()
            self.gathering.run(self.executor.recorder, gradients=optimizer.changes_gradients)
        self.gradients.note_applied()
        if good:
            optimizer.share_settings(self.member, self.updating)

    def ran_as_planned(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """The last step, of these micro-batches, was the plan's own: of its rows, micro-batches and graph."""
        rows, count = sum(each.rows for each in micro_batches), len(micro_batches)
        same = (self.cutting.counted(rows), count) == (self.plan.workload.batch_size, self.plan.micro_batches)
        return same and self.training.as_planned

    def forget(self) -> None:
        """Drop what an unfinished step or forward holds."""
        self.training.forget()
        self.inference.forget()
        self.gradients.forget()
