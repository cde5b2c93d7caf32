"""The user's own optimizer on one partition: seconds of an update, its workspace, and the state that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from assigner.profiler.memory import peak_bytes, storage_bytes
from assigner.profiler.stopwatch import Stopwatch

if TYPE_CHECKING:
    from assigner.workload import Workload

_OTHERS_BYTES = 64 << 20  # twice what the last caches of most processors hold
_OTHERS_SHARE = 8  # and no more than this part of what is free


class UpdateBench:
    """The user's optimizer on one partition's parameters.

    Args:
        workload: Whose optimizer.
        module: The partition; it has parameters that are trained, which get gradients and are changed.
        device: Where it is.
        room: Bytes that are free there.
    """

    def __init__(self, workload: Workload, module: fx.GraphModule, device: torch.device, *, room: float) -> None:
        self.watch = Stopwatch(device)
        self.parameters = trained(module)
        self.optimizer = workload.make_optimizer(
            (name, each) for name, each in module.named_parameters() if each.requires_grad
        )
        others = max(1, int(min(_OTHERS_BYTES, room / _OTHERS_SHARE)))
        self.others = torch.empty(others, dtype=torch.uint8, device=device)

    def run(self) -> tuple[float]:
        """Seconds of one update."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.others.fill_(1)  # a step's backwards have taken parameters and state out of the caches
        self.watch.mark()
        self.optimizer.step()
        self.watch.mark()
        return (self.watch.seconds()[0],)

    def workspace_bytes(self) -> int:
        """Bytes that an update needs besides parameters, gradients and state; `run` has been called."""
        return peak_bytes(self.optimizer.step, self.watch.device)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state after an update."""
        return _state_bytes(self.optimizer)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [each for each in module.parameters() if each.requires_grad]


def optimizer_share(workload: Workload, device: torch.device) -> float:
    """Bytes of state that the user's optimizer keeps for a byte of parameters, found on a small one."""
    parameter = nn.Parameter(torch.zeros(64, 64, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = workload.make_optimizer([("weight", parameter)])
    optimizer.step()
    return _state_bytes(optimizer) / parameter.nbytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = (value for state in optimizer.state.values() for value in state.values())
    return storage_bytes(value for value in states if isinstance(value, torch.Tensor))
