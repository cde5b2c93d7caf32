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

_PLACE = Place(seed=0, step=0, micro_batch=0)


@dataclass(frozen=True)
class PartitionBytes:
    """Bytes of one partition at one micro-batch size."""

    activation_bytes: int
    workspace_bytes: int


class PartitionBench:
    """One partition with its inputs, ready to be run again and again.

    The gradients of its parameters stay allocated, as they are for every micro-batch but the first of a step.

    Args:
        runner: The runtime's own runner of the partition, not rematerialising.
        reads: Real values of what it reads, from the partitions before it.
        needs_gradient: Which of them get a gradient back.
        sizes: The numbers that it needs.
        device: Where it runs.
    """

    def __init__(
        self,
        runner: PartitionRunner,
        reads: Sequence[torch.Tensor],
        needs_gradient: Sequence[bool],
        sizes: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.runner, self.sizes, self.device = runner, sizes, device
        self.reads = [
            value.detach().to(device).requires_grad_(wanted)
            for value, wanted in zip(reads, needs_gradient, strict=True)
        ]
        self.gradients: list[torch.Tensor | None] = []

    def prepare(self) -> None:
        """First forward and backward: allocates the gradients."""
        outputs = self.runner.forward(_PLACE, self.reads, self.sizes)
        self.gradients = [
            torch.randn_like(output) if wanted and self.runner.finish is None else None
            for output, wanted in zip(outputs, self.runner.gradients, strict=True)
        ]
        self._backward()

    def _forward(self) -> tuple[torch.Tensor, ...]:
        return self.runner.forward(_PLACE, self.reads, self.sizes)

    def _backward(self) -> None:
        for value in self.reads:
            value.grad = None  # each micro-batch has leaves of its own
        self.runner.backward(_PLACE, self.reads, self.sizes, self.gradients)

    def run(self) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        begin = self._now()
        self._forward()
        middle = self._now()
        self._backward()
        return middle - begin, self._now() - middle

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def bytes(self) -> PartitionBytes:
        """What it keeps between forward and backward, and what it needs besides while it runs."""
        known = [*self.runner.module.parameters(), *self.runner.module.buffers(), *self.reads]
        made: list[torch.Tensor] = []

        def forward() -> Sequence[torch.Tensor]:
            made.extend(self._forward())
            return made

        kept = saved_bytes(forward, known)
        self._backward()
        outputs = 0 if self.runner.finish is not None else storage_bytes(made)
        made.clear()
        for value in self.reads:
            value.grad = None  # what was there before must not be freed while the peak is taken

        def both() -> None:
            outputs = self._forward()
            self._backward()
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
