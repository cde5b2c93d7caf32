"""Loss and outputs without training: forwards alone, in eval mode, pipelined over the micro-batches.

No graph is kept, nothing runs again, and a value is dropped when its last reader has run. Modules are in the mode of
the model's own `eval()` meanwhile. Randomness, if eval mode leaves any, is that of the training step to come.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from assigner.runtime.batch.needs import given_pair
from assigner.runtime.step.executor import Executor
from assigner.runtime.step.loss import check_groups
from assigner.runtime.step.outputs import BatchOutputs
from assigner.runtime.step.results import added, nothing, shared_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from assigner.model.workload import Batch, Workload
    from assigner.runtime.batch.callcomparison import CallComparison, GivenBatch
    from assigner.runtime.batch.microbatch import Cutting
    from assigner.runtime.batch.needs import Needs
    from assigner.runtime.batch.recurrence import CarriedState
    from assigner.runtime.batch.variants import Variant, VariantGroup, Variants
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.replicas import ReplicaWatch
    from assigner.runtime.step.outputs import Receiver
    from assigner.runtime.step.results import StepResult


def without_training(workload: Workload) -> Workload:
    """A workload for forwards alone: it needs no optimizer of the user's."""
    return replace(workload, optimizer=lambda stand_ins: torch.optim.SGD([{"params": stand_ins}], lr=0.0))


class Inference:
    """The forwards of this rank without training.

    Args:
        variants: The model's graphs.
        member: This process in the run.
        workload: The loss and the seed.
        cutting: Of batches into micro-batches.
        comparison: Of the calls that all ranks make.
        needs: What this rank needs of a batch.
        carried: The state that goes from batch to batch, apart from that of training.
        watch: Of what evaluations change in stages that several workers share.
    """

    def __init__(
        self,
        variants: Variants,
        member: Membership,
        workload: Workload,
        *,
        cutting: Cutting,
        comparison: CallComparison,
        needs: Needs,
        carried: CarriedState,
        watch: ReplicaWatch,
    ) -> None:
        self.variants, self.member, self.workload = variants, member, workload
        self.cutting, self.comparison, self.needs = cutting, comparison, needs
        self.carried, self.watch = carried, watch
        self._flags = variants.planned.graph.deferred.flags(training=False)
        self._executors: WeakKeyDictionary[Variant, Executor] = WeakKeyDictionary()
        self._running: Executor | None = None

    def evaluate(self, call: str, batch: Batch | None, number: int, outputs_to: Receiver | None = None) -> StepResult:
        """The loss and the metrics over a batch; see `Pipeline.evaluate`.

        Args:
            call: What is called, with its arguments but the batch.
            batch: (inputs, targets); None for what this rank was not given.
            number: Of the batch that is trained on next.
            outputs_to: Who wants the model's outputs; None: nobody.
        """
        pair = given_pair(batch)
        self.variants.planned.graph.check_read()
        groups = self._groups(self.comparison.given(call, pair, weigh=self.cutting.weigher(self.variants.plan)))
        check_groups(self.workload, groups)
        outputs = None if outputs_to is None else BatchOutputs(groups, self.workload, self.variants.plan, outputs_to)
        result = shared_result(self._run(groups, number, outputs), self.workload, self.member)
        if outputs is not None:
            result.outputs = outputs.carry(self.member)
        return result

    def forward(self, inputs: Any, number: int, to: int | None) -> Any:
        """The model's output on rank `to`; see `Pipeline.forward`."""
        self.variants.planned.graph.check_read()
        groups = self._groups(self.comparison.given(f"forward(to={to})", (inputs, None), loss=False), loss=False)
        receiver: Receiver = "all" if to is None else to
        outputs = BatchOutputs(groups, self.workload, self.variants.plan, receiver, alone=True)
        self._run(groups, number, outputs)
        return outputs.carry(self.member)

    def _groups(self, batch: GivenBatch, *, loss: bool = True) -> list[VariantGroup]:
        inputs, targets, weights = batch
        count = self.cutting.count(self.cutting.row_count(inputs), self.variants.plan)
        micro_batches = self.cutting.split((inputs, targets), count, weighed=loss, weights=weights)
        groups = self.variants.groups(self.carried.given_to(micro_batches), training=False)
        self.carried.bring(groups)
        self.needs.check_groups(groups, loss=loss)
        return groups

    def _executor(self, variant: Variant) -> Executor:
        if variant not in self._executors:
            self._executors[variant] = Executor(
                variant.graph, variant.modules, self.member, self.workload, carried=self.carried.sources(variant.graph)
            )
        return self._executors[variant]

    def _run(self, groups: list[VariantGroup], number: int, outputs: BatchOutputs | None) -> dict[int, list[float]]:
        """All forwards; by the ranks that make the model's output their numbers."""
        found: dict[int, list[float]] = {}
        for group in groups:
            self._running = executor = self._executor(group.variant)
            program = group.variant.programs.counted(len(group.places), training=False)
            with self._eval_mode(), torch.no_grad():
                self.watch.begin(training=False)
                numbers = executor.run(program, group.micro_batches, number, places=group.places, outputs=outputs)
                self.watch.end()
            executor.stores.commit()
            self._running = None
            for rank in group.variant.makers:
                found[rank] = added(found.get(rank) or nothing(self.workload), numbers)
        self.carried.keep([(group, self._executor(group.variant).made) for group in groups])
        return found

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """This rank's modules, and the builder's, which a loss may ask, in the mode of `eval()`; then as they were.

        Those with an `eval` or `train` of their own do what it does, as merging weights, and what `train()` does behind
        it, as in a script's loop. Those that are left training, as some models do with BatchNorm, move their buffers:
        these are put back.
        """
        named = [
            (name, module) for held in self.variants.planned.modules.values() for name, module in held.named_modules()
        ]
        builders = self.variants.planned.graph.deferred.model.named_modules()
        flagged = [(module, module.training, self._flags.get(name, False)) for name, module in (*named, *builders)]
        training = [module for name, module in named if self._flags.get(name, False)]
        buffers = [buffer for module in training for buffer in module.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        own = outermost(module for _, module in named if has_own_mode(module))
        try:
            for module in own:
                module.eval()
            for module, _, flag in flagged:
                module.training = flag
            yield
        finally:
            for module in own:
                module.train()
            for module, flag, _ in flagged:
                module.training = flag
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    def forget(self) -> None:
        """Drop what an unfinished forward holds."""
        if self._running is not None:
            self._running.forget()
            self._running = None
        self.watch.forget()


def has_own_mode(module: nn.Module) -> bool:
    """True if a module's class has a `train` or `eval` of its own."""
    kind = type(module)
    return not isinstance(module, fx.GraphModule) and (
        kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    )


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those modules that lie in none of the others."""
    listed = list(modules)
    inner = {id(each) for module in listed for each in module.modules() if each is not module}
    return [module for module in listed if id(module) not in inner]
