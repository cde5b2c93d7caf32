"""The user's own optimizer on some parameters: seconds of an update, its workspace, and the state that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from assigner.model.deferred.likeness import in_likeness
from assigner.model.members import named_parameters, parameters
from assigner.profiler.memory import peak_bytes, storage_bytes
from assigner.profiler.sampling import Stopwatch
from assigner.runtime.update.building import StandInParameters, built_optimizer
from assigner.runtime.update.separability import needs_closure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload

_OTHERS_BYTES = 64 << 20  # twice what the last caches of most processors hold
_LEAST_ELEMENTS = 4096  # of a parameter that tells how much state there is
_MOST_UPDATES = 16  # until the state grows no more
_OTHERS_SHARE = 8  # and no more than this part of what is free


class UpdateBench:
    """An update of some of a model's parameters by the user's optimizer, whose builder gets all of them.

    One that needs a closure gets the gradients of a sum of squares, some of which count a thousand times as much as
    others: so it uses all of the evaluations that it may, and fills its history. Of the parameters held those that are
    trained get gradients and are changed; `room` is what is free there, in bytes.
    """

    def __init__(
        self, workload: Workload, graph: PartitionGraph, held: Mapping[str, nn.Parameter], device: torch.device,
        *, room: float,
    ) -> None:  # fmt: skip
        self.watch = Stopwatch(device)
        self.optimizer, _ = built_optimizer(workload, StandInParameters(graph.deferred.model.named_parameters()), held)
        self._trained = [each for each in held.values() if each.requires_grad]
        self._closed = needs_closure(self.optimizer)
        others = max(1, int(min(_OTHERS_BYTES, room / _OTHERS_SHARE)))
        self.others = torch.empty(others, dtype=torch.uint8, device=device)

    def run(self) -> tuple[float]:
        """Seconds of one update."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._closed:
                parameter.detach().normal_()
        self.others.fill_(1)  # a step's backwards have taken parameters and state out of the caches
        self.watch.mark()
        self._update()
        self.watch.mark()
        return (self.watch.seconds()[0],)

    def _update(self) -> None:
        if self._closed:
            self.optimizer.step(self._evaluate)
        else:
            self.optimizer.step()

    @torch.no_grad()
    def _evaluate(self) -> float:
        parts = []
        for parameter in self._trained:
            assert parameter.grad is not None
            rows = torch.linspace(1e-3, 1, max(1, len(parameter)) if parameter.dim() else 1, device=parameter.device)
            weights = rows.to(parameter.dtype).view(-1, *[1] * (parameter.dim() - 1)) if parameter.dim() else rows[0]
            torch.mul(parameter, weights, out=parameter.grad)
            parts.append(torch.linalg.vecdot(parameter.flatten(), parameter.grad.flatten()).float() / 2)
        return float(torch.stack(parts).sum())

    def workspace_bytes(self) -> int:
        """Bytes that an update needs besides parameters, gradients and state; `run` has been called."""
        return peak_bytes(self._update, self.watch.device)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state now."""
        leaves = (leaf for state in self.optimizer.state.values() for leaf in tree_leaves(state))
        return storage_bytes(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [each for each in parameters(module) if each.requires_grad]


def optimizer_share(workload: Workload, graph: PartitionGraph, device: torch.device) -> float:
    """Bytes of state that the user's optimizer keeps for a byte of parameters, found on a small one of each group."""
    model = dict(named_parameters(graph.deferred.model))
    _, groups = built_optimizer(workload, StandInParameters(model.items()), {})
    trained = [[name for name in names if model[name].requires_grad] for names in groups]
    chosen = [min(names, key=lambda name: _strangeness(model[name])) for names in trained if names]
    held = {
        name: cast("nn.Parameter", in_likeness(model[name], torch.zeros_like(model[name], device=device)))
        for name in chosen
    }
    if not held:
        return 0.0
    bench, state = UpdateBench(workload, graph, held, device, room=0), -1
    for _ in range(_MOST_UPDATES):
        bench.run()
        before, state = state, bench.state_bytes()
        if state == before:
            break
    return state / sum(each.nbytes for each in held.values())


def _strangeness(parameter: nn.Parameter) -> tuple[bool, int]:
    """Large enough that a count of steps is nothing beside it, and no larger: that is what is tried first."""
    return parameter.numel() < _LEAST_ELEMENTS, abs(parameter.numel() - _LEAST_ELEMENTS)
