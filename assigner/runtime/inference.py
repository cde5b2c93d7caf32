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
import torch.distributed as dist
from torch import fx, nn

from assigner.deferred.memento import Memento
from assigner.errors import UsageError
from assigner.location import Location
from assigner.runtime.batchnorm import DeferredStatistics
from assigner.runtime.executor import Executor
from assigner.runtime.loss import check_groups
from assigner.runtime.microbatch import check_pair
from assigner.runtime.outputs import OutputRoutes, Part, join
from assigner.runtime.remat import Rematerialisation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.runtime.membership import Membership
    from assigner.runtime.microbatch import Cutting
    from assigner.runtime.partition import PartitionRunner
    from assigner.runtime.sameness import SameCall
    from assigner.runtime.variants import Group, Variant, Variants
    from assigner.workload import Batch, Workload


class _ForwardExecutor(Executor):
    """Runs the forwards of one worker.

    Attributes:
        outputs: What the model's last partition made, by micro-batch; None: the loss is wanted instead.
    """

    trains = False
    outputs: dict[int, tuple[Any, ...]] | None = None

    def _finish(self, outputs: Sequence[Any], place: int, runs_again: bool) -> tuple[torch.Tensor, ...]:
        if self.outputs is None:
            return super()._finish(outputs, place, runs_again)
        self.outputs[place] = tuple(outputs)
        return (torch.zeros(()),)

    def _forward(self, runner: PartitionRunner, micro_batch: int) -> None:
        super()._forward(runner, micro_batch)
        step = self._stepped
        for value in runner.piece.reads:
            if value.partition:
                step.readers[value, micro_batch] -= 1
                if not step.readers[value, micro_batch]:
                    del step.leaves[value, micro_batch]


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
        same: Whether all ranks make the same call.
    """

    def __init__(
        self, variants: Variants, member: Membership, workload: Workload, *, cutting: Cutting, same: SameCall
    ) -> None:
        self.variants, self.member, self.workload = variants, member, workload
        self.cutting, self.same = cutting, same
        self._flags = variants.planned.graph.deferred.flags(training=False)
        self._always = Rematerialisation("always", variants.plan)
        self._no_statistics = DeferredStatistics({}, "micro_batch")
        self._executors: WeakKeyDictionary[Variant, _ForwardExecutor] = WeakKeyDictionary()
        self._running: Executor | None = None

    def evaluate(self, batch: Batch, number: int) -> float:
        """The loss over a batch; see `Pipeline.evaluate`.

        Args:
            batch: (inputs, targets).
            number: Of the batch that is trained on next.
        """
        check_pair(batch)
        self.variants.planned.graph.check_read()
        self.same.check("evaluate", batch)
        losses: dict[int, float] = {}
        groups = self._groups(batch)
        check_groups(self.workload, [group for group, _ in groups])
        for group, executor in groups:
            executor.outputs = None
            rank = Location.parse(group.variant.last_worker).rank
            losses[rank] = losses.get(rank, 0.0) + self._run(group, executor, number)
        return sum(self.member.number_from(rank, loss) for rank, loss in losses.items())

    def forward(self, inputs: Any, number: int, to: int | None) -> Any:
        """The model's output on rank `to`; see `Pipeline.forward`."""
        self.variants.planned.graph.check_read()
        self.same.check(f"forward(to={to})", inputs)
        world = dist.get_world_size() if dist.is_initialized() else 1
        made: dict[int, Part] = {}
        graphs, makers = [], set()
        for group, executor in self._groups((inputs, None)):
            executor.outputs = {}
            self._run(group, executor, number)
            graphs.append(group.variant.graph)
            makers.add(group.variant.last_worker)
            rows = {place: cut.rows for place, cut in _placed(group)}
            output = group.variant.graph.output
            made.update({n: Part(output, output.filled(each), rows[n]) for n, each in executor.outputs.items()})
            executor.outputs = None
        if len(makers) > 1 or any(graph.output.structure != graphs[0].output.structure for graph in graphs):
            raise UsageError(
                "the model's output has another structure for some micro-batches than for others",
                hint="give batches whose micro-batches are alike",
            )
        routes = OutputRoutes(self.variants.plan, makers.pop(), graphs[0], range(world) if to is None else [to])
        self.member.at = "joining the micro-batches' outputs"
        joined = join([made[place] for place in sorted(made)]) if made else None
        self.member.at = "the transfer of the model's output"
        leaves = routes.carry(joined, self.member)
        return None if leaves is None else graphs[0].rebuild_output(leaves)

    def _groups(self, batch: Batch) -> list[tuple[Group, _ForwardExecutor]]:
        count = self.cutting.count(self.cutting.row_count(batch[0]), self.variants.plan)
        micro_batches = self.cutting.split(batch, count, weighed=batch[1] is not None)
        groups = self.variants.groups(micro_batches, training=False)
        return [(group, self._executor(group.variant)) for group in groups]

    def _executor(self, variant: Variant) -> _ForwardExecutor:
        if variant not in self._executors:
            self._executors[variant] = _ForwardExecutor(
                variant.graph, variant.modules, self.member, self.workload,
                remat=self._always, statistics=self._no_statistics,
            )  # fmt: skip
        return self._executors[variant]

    def _run(self, group: Group, executor: _ForwardExecutor, number: int) -> float:
        self._running = executor
        program = group.variant.programs.counted(len(group.places), training=False)
        with self._eval_mode(), torch.no_grad():
            loss = executor.run(program, group.micro_batches, number, places=group.places)
        executor.stores.commit()
        self._running = None
        return loss

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """This rank's modules in the mode of the model's own `eval()`; then as they were.

        Those with an `eval` or `train` of their own do what it does, as merging weights, and take it back. Those that
        are left training, as some models do with BatchNorm, move their buffers: these are put back.
        """
        named = [
            (name, module) for held in self.variants.planned.modules.values() for name, module in held.named_modules()
        ]
        before = [(module, module.training) for _, module in named]
        training = [module for name, module in named if self._flags.get(name, False)]
        buffers = [buffer for module in training for buffer in module.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        own = outermost(module for _, module in named if has_own_mode(module))
        try:
            with Memento(each for module in own for each in module.modules()).put_back():
                for module in own:
                    module.eval()
                for name, module in named:
                    module.training = self._flags.get(name, False)
                yield
                for module in own:
                    module.train()
        finally:
            for module, flag in before:
                module.training = flag
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    def forget(self) -> None:
        """Drop what an unfinished forward holds."""
        if self._running is not None:
            self._running.forget()
            self._running = None


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


def _placed(group: Group) -> Iterator[tuple[int, Any]]:
    return zip(group.places, group.micro_batches, strict=True)
