"""Time and memory of one partition on this worker."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from assigner.profiler.memory import peak_bytes, saved_bytes, storage_bytes
from assigner.runtime.partition import PartitionRunner, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.marking import Piece
    from assigner.workload import Workload


@dataclass(frozen=True)
class PartitionBytes:
    """Bytes of one partition at one micro-batch size."""

    activation_bytes: int
    workspace_bytes: int


class PartitionBench:
    """One partition with its inputs, ready to be run again and again.

    It is run as in a step under GPipe: some micro-batches forward, then the same ones backward, so that each forward
    finds memory that is new to it and not what the last one has just freed (measured on a GPT on two CPU ranks: one
    micro-batch at a time promises steps that are 14 % too short). The gradients of its parameters stay allocated, as
    they are for every micro-batch but the first of a step.

    Args:
        runner: The runtime's own runner of the partition, not rematerialising.
        reads: Real values of what it reads, from the partitions before it.
        needs_gradient: Which of them get a gradient back.
        sizes: The numbers that it needs.
        device: Where it runs.
        depth: Micro-batches in flight.
    """

    def __init__(
        self,
        runner: PartitionRunner,
        reads: Sequence[torch.Tensor],
        needs_gradient: Sequence[bool],
        sizes: Sequence[Any],
        *,
        device: torch.device,
        depth: int = 1,
    ) -> None:
        self.runner, self.sizes, self.device, self.depth = runner, sizes, device, depth
        values = [value.detach().to(device) for value in reads]
        self.reads = [
            [value.detach().requires_grad_(wanted) for value, wanted in zip(values, needs_gradient, strict=True)]
            for _ in range(depth)
        ]
        self.gradients: list[torch.Tensor | None] = []

    def prepare(self) -> None:
        """First forward and backward: allocates the gradients."""
        outputs = self._forward(0)
        self.gradients = [
            torch.randn_like(output) if wanted and self.runner.finish is None else None
            for output, wanted in zip(outputs, self.runner.gradients, strict=True)
        ]
        self._backward(0)

    def _forward(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        return self.runner.forward(Place(0, 0, micro_batch), self.reads[micro_batch], self.sizes)

    def _backward(self, micro_batch: int) -> None:
        for value in self.reads[micro_batch]:
            value.grad = None  # in a step each micro-batch has leaves of its own
        self.runner.backward(Place(0, 0, micro_batch), self.reads[micro_batch], self.sizes, self.gradients)

    def run(self) -> tuple[float, float]:
        """Seconds of one forward and one backward, as means over the micro-batches in flight."""
        begin = self._now()
        for micro_batch in range(self.depth):
            self._forward(micro_batch)
        middle = self._now()
        for micro_batch in reversed(range(self.depth)):
            self._backward(micro_batch)
        return (middle - begin) / self.depth, (self._now() - middle) / self.depth

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def bytes(self) -> PartitionBytes:
        """What it keeps between forward and backward, and what it needs besides while it runs."""
        known = [*self.runner.module.parameters(), *self.runner.module.buffers(), *self.reads[0]]
        made: list[torch.Tensor] = []

        def forward() -> Sequence[torch.Tensor]:
            made.extend(self._forward(0))
            return made

        kept = saved_bytes(forward, known)
        self._backward(0)
        outputs = 0 if self.runner.finish is not None else storage_bytes(made)
        made.clear()
        for value in self.reads[0]:
            value.grad = None  # what was there before must not be freed while the peak is taken

        def both() -> None:
            outputs = self._forward(0)
            self._backward(0)
            del outputs

        return PartitionBytes(kept, max(0, peak_bytes(both, self.device) - kept - outputs))


class UpdateBench:
    """The user's optimizer on one partition's parameters.

    Args:
        workload: Whose optimizer.
        module: The partition; its parameters get gradients and are changed.
        device: Where it is.
    """

    def __init__(self, workload: Workload, module: fx.GraphModule, device: torch.device) -> None:
        self.device = device
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = workload.optimizer(self.parameters) if self.parameters else None

    def run(self) -> tuple[float]:
        """Seconds of one update."""
        if self.optimizer is None:
            return (0.0,)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin,)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state after an update."""
        if self.optimizer is None:
            return 0
        tensors = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return storage_bytes(tensors)


def state_bytes(piece: Piece, tensors: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Bytes of a partition's parameters, of their gradients, and of its buffers; a shared tensor once.

    Args:
        piece: The partition.
        tensors: The model's tensors by name, on any device.
    """
    held = {id(tensors[name]): tensors[name] for name in piece.parameters}
    parameters = sum(tensor.nbytes for tensor in held.values())
    gradients = sum(tensor.nbytes for tensor in held.values() if tensor.requires_grad)
    buffers = sum({id(tensors[name]): tensors[name].nbytes for name in piece.buffers}.values())
    return parameters, gradients, buffers
