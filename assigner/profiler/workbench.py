"""Partitions that are built, with the inputs of their kinds: a bench of any of them, at any size, as far as it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from assigner.model.marking import PartitionGraph
from assigner.model.workload import Workload
from assigner.profiler.memory import memory_errors
from assigner.profiler.partitionbench import PartitionBench, PartitionBytes, TooLargeError
from assigner.profiler.tasks import Point
from assigner.profiler.walk import KindInputs
from assigner.runtime.forward.compiling import compiled
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.step.partition import PartitionRunner

_DEPTH = 4


@dataclass
class Workbench:
    """What benches are made of.

    Args:
        workload: Its loss and batches.
        graph: Its partitions.
        device: Where they run.
        modules: Those that are built.
        inputs: By micro-batch size, then by partition: one of each kind.
        state_share: Bytes of optimizer state for a byte of parameters.
        room: Bytes that a measurement may take now.
        in_parts: Their backwards are timed in two parts too.
        held: What is known of the bytes of points so far.
    """

    workload: Workload
    graph: PartitionGraph
    device: torch.device
    modules: Mapping[str, fx.GraphModule]
    inputs: Mapping[int, Mapping[str, KindInputs]]
    state_share: float
    room: Callable[[], float]
    in_parts: bool = False
    held: dict[Point, PartitionBytes] = field(default_factory=dict)

    def kind(self, point: Point) -> str:
        """The kind of a point's partition."""
        return self.graph.piece[point.partition].kind

    def measured(self, point: Point) -> PartitionBench:
        """A bench that has run once; what it takes is in `held`.

        Raises:
            MemoryError: it does not fit.
        """
        with memory_errors():
            bench = self._bench(point, optimizer=True)
            smaller = self._known(point, [each for each in self.held if each.partition == point.partition])
            scale = point.micro_batch / smaller.micro_batch if smaller else 1.0
            self.held[point] = bench.prepare(self.held[smaller] if smaller else None, scale=scale)
        return bench

    def companion(self, point: Point) -> PartitionBench:
        """A bench that runs beside measured ones, and has run once: it needs memory, but no optimizer.

        Raises:
            MemoryError: it does not fit, or nobody knows and this is not the smallest size.
        """
        alike = self._known(point, [each for each in self.held if self.kind(each) == self.kind(point)])
        with memory_errors():
            bench = self._bench(point, optimizer=False)
            if alike is None and point.micro_batch > min(self.inputs):
                raise TooLargeError(f"what {point.partition} takes is not known")
            if alike is not None and alike.micro_batch == point.micro_batch:
                self.held[point] = self.held[alike]
                bench.join(self.held[alike])
            else:
                scale = point.micro_batch / alike.micro_batch if alike else 1.0
                self.held[point] = bench.prepare(self.held[alike] if alike else None, scale=scale)
        return bench

    @staticmethod
    def _known(point: Point, points: Sequence[Point]) -> Point | None:
        """Of some points the largest that is no larger than this one."""
        return max(
            (each for each in points if each.micro_batch <= point.micro_batch),
            key=lambda each: each.micro_batch,
            default=None,
        )

    def _bench(self, point: Point, *, optimizer: bool) -> PartitionBench:
        """A partition with the inputs of the one that stands for its kind."""
        piece, module = self.graph.piece[point.partition], self.modules[point.partition]
        known = self.inputs[point.micro_batch]
        given = next((known[name] for name in known if self.graph.piece[name].kind == piece.kind), None)
        if given is None:
            raise TooLargeError(f"its inputs at micro-batch {point.micro_batch} are too many to be kept")
        needs = [bool(value.partition) and self.graph.values[value].gradient for value in piece.reads]
        runner = PartitionRunner(
            piece,
            module,
            self.device,
            rematerialise=False,
            gradients=self.graph.output_gradients(piece),
            state=PartitionState(module),
            finish=self._loss(given) if piece is self.graph.last else None,
            run=compiled(module, piece.name, self.workload.compile),
            differentiates=any(needs),
            draws=self.graph.deferred.vocabulary.draws,
        )
        parameters = sum(each.nbytes for each in module.parameters())
        depth = max(1, min(_DEPTH, self.workload.batch_size // point.micro_batch))  # those of a step, a few at most
        return PartitionBench(
            runner, given.reads, needs, given.sizes, device=self.device, depth=depth,
            optimizer_bytes=self.state_share * parameters if optimizer else 0.0, room=self.room,
        )  # fmt: skip

    def _loss(self, given: KindInputs) -> Callable[[Sequence[torch.Tensor], int, bool], tuple[torch.Tensor, ...]]:
        targets = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(self.device), given.micro_batch.targets
        )
        return lambda outputs, *_: (self.workload.compute_loss(self.graph.rebuild_output(outputs), targets),)
