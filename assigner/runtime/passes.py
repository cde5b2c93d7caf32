"""Batches through the graphs that their micro-batches need: nearly always the plan's own, and one program.

In training forwards and backwards. Without it forwards alone, in eval mode, pipelined over the micro-batches: no graph
is kept, nothing runs again, and a value is dropped when its last reader has run. Modules are in the mode of the model's
own `eval()` meanwhile. Randomness, if eval mode leaves any, is that of the training step to come.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.memento import found_at, put
from assigner.model.deferred.modes import eval_attributes, switch_modes
from assigner.runtime.step.executor import Executor
from assigner.runtime.step.loss import check_groups
from assigner.runtime.step.outputs import BatchOutputs
from assigner.runtime.step.results import added, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.model.workload import Workload
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.runtime.batch.needs import Needs
    from assigner.runtime.batch.recurrence import CarriedState
    from assigner.runtime.batch.variants import Variant, Variants
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.recording.memory import HeapRoom
    from assigner.runtime.stages.reduction import Reduction
    from assigner.runtime.stages.replicas import ReplicaWatch
    from assigner.runtime.step.executor import Training
    from assigner.runtime.step.outputs import Receiver

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_training(workload: Workload) -> Workload:
    """A workload for forwards alone: it needs no optimizer of the user's."""
    return replace(workload, optimizer=lambda stand_ins: torch.optim.SGD([{"params": stand_ins}], lr=0.0))


def of_one_batch(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A method of a pipeline that takes one argument by its place, as a model may take several."""

    @functools.wraps(method)
    def called(*places: Arguments.args, **settings: Arguments.kwargs) -> Result:
        if len(places) > 2:
            name = method.__name__
            raise UsageError(
                f"pipeline.{name} takes one argument by its place, and was given {len(places) - 1}",
                hint=f"pipeline.{name}((inputs, targets)), a batch as one tuple; inputs of several tensors are one too"
                if name != "forward"
                else "pipeline.forward(inputs): inputs of several tensors are one tuple, or a dict",
            )
        return method(*places, **settings)

    return called


class BatchPasses:
    """The forwards of this rank, and in training its backwards.

    Args:
        carried: The state that goes from batch to batch: training has its own.
        room: For what this rank's heap keeps, where there is little.
        training: None: there are forwards alone.

    Attributes:
        as_planned: The last batch did what the plan says and nothing else: its program's actions, through one graph.
            Micro-batches of one row have a graph of their own, mostly with the same actions.
    """

    def __init__(
        self,
        variants: Variants,
        member: Membership,
        workload: Workload,
        *,
        needs: Needs,
        carried: CarriedState,
        watch: ReplicaWatch,
        room: HeapRoom | None,
        training: Training | None,
    ) -> None:
        self.variants, self.member, self.workload = variants, member, workload
        self.needs, self.carried, self.watch = needs, carried, watch
        self.training, self.room, self.trains = training, room, training is not None
        self.as_planned = True
        graph = variants.planned.graph
        called = (name for piece in graph.pieces for name in piece.called)
        self._attributes = {} if self.trains else eval_attributes(graph.deferred, called)
        self._executors: WeakKeyDictionary[Variant, Executor] = WeakKeyDictionary()

    def executor(self, variant: Variant) -> Executor:
        """What runs a graph."""
        if variant not in self._executors:
            self._executors[variant] = Executor(
                variant.graph, variant.modules, self.member, self.workload,
                training=self.training, carried=self.carried.sources(variant.graph), room=self.room,
            )  # fmt: skip
        return self._executors[variant]

    @property
    def is_idle(self) -> bool:
        """No batch is under way."""
        return not any(each.step.micro_batches for each in self._executors.values())

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        number: int,
        *,
        loss: bool = True,
        loss_factor: float = 1.0,
        outputs_to: Receiver | None = None,
        reduction: Reduction | None = None,
    ) -> tuple[dict[int, list[float]], BatchOutputs | None]:
        """Run all micro-batches of a batch forward, and in training backward; gradients add up in the parameters.

        Args:
            micro_batches: The batch, cut.
            number: The batch's number in training, or that of the one that is trained on next.
            loss: False: outputs alone are wanted, and of the batch there are no targets.
            loss_factor: What the loss's gradient is multiplied by.
            outputs_to: Who wants the model's outputs; None: nobody.
            reduction: Adds up the gradients of stages that several workers share; it begins here where the step runs
                one graph alone, with the plan's actions.

        Returns:
            By the ranks that make the model's output their numbers (see `step.results`), and the outputs.
        """
        groups = self.variants.groups(self.carried.given_to(micro_batches), training=self.trains)
        self.carried.bring(groups)
        self.needs.check_groups(groups, loss=loss)
        if loss:
            check_groups(self.workload, groups)
        programs = [group.variant.program(len(group.places), training=self.trains) for group in groups]
        if self.trains:
            planned = self.variants.planned.program(len(micro_batches), training=True)
            self.as_planned = len(groups) == 1 and programs[0].actions == planned.actions
        outputs = None
        if outputs_to is not None:
            outputs = BatchOutputs(groups, self.workload, outputs_to, alone=not loss)
        found: dict[int, list[float]] = {}
        executors = [self.executor(group.variant) for group in groups]
        with contextlib.nullcontext() if self.trains else self._eval_mode():
            self.watch.begin(training=self.trains)
            for group, program, executor in zip(groups, programs, executors, strict=True):
                if self.trains:
                    executor.recorder = self.executor(self.variants.planned).recorder
                with _going_back(group.micro_batches):
                    numbers = executor.run(
                        program, group.micro_batches, number, places=group.places, loss_factor=loss_factor,
                        outputs=outputs, reduction=reduction if self.as_planned else None,
                    )  # fmt: skip
                for rank in group.variant.makers:
                    found[rank] = added(found.get(rank) or nothing(self.workload), numbers)
            self.watch.end()
        self.carried.keep([(group, executor.made) for group, executor in zip(groups, executors, strict=True)])
        if self.training is not None:
            self.member.at = "the exchange of BatchNorm statistics"
            self.member.before_sums()
            self.training.statistics.exchange(len(micro_batches))
            self.training.statistics.commit()
        for executor in executors:
            executor.stores.commit()
        return found, outputs

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """This rank's modules, and the builder's, which a loss may ask, in the mode of `eval()`; then as they were.

        Those with a `train` of their own do what it does, as merging weights, and behind it what it does with the mode
        that they were in, as in a script's loop. Those that are left training, as some models do with BatchNorm, move
        their buffers: these are put back.
        """
        named = [each for held in self.variants.planned.modules.values() for each in held.named_modules()]
        builders = self.variants.planned.graph.deferred.model.named_modules()
        entries = [
            (vars(module), key, value)
            for name, module in (*named, *builders)
            for key, value in self._attributes.get(name, {"training": False}).items()
        ]
        own, before = [module for _, module in named], found_at(entries)
        flags = {module: module.training for module in own}
        training = [module for name, module in named if self._attributes.get(name, {}).get("training")]
        buffers = [buffer for module in training for buffer in module.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        try:
            switch_modes(own, {})
            put(entries)
            with torch.no_grad():
                yield
        finally:
            switch_modes(own, flags)
            put(before)
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    def forget(self) -> None:
        """Drop what an unfinished batch holds."""
        for executor in self._executors.values():
            executor.forget()
        self.watch.forget()


@contextlib.contextmanager
def _going_back(micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Say where each backward in the block goes on through what the script has computed the batch with."""
    try:
        yield
    except RuntimeError as error:
        given = pytree.tree_leaves([(each.inputs, each.targets) for each in micro_batches])
        has_graph = any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in given)
        if not has_graph or len(micro_batches) < 2 or "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "the batch has a tensor that the script has computed with a gradient, and each of"
            f" {len(micro_batches)} micro-batches goes back through what has computed it, which torch keeps for one",
            hint="give it by detach() where nothing there trains; else have the model compute it",
        ) from error
