"""A rank's share of a model: the partitions that a plan gives it, as modules with their weights under their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from assigner.marking import PartitionGraph
    from assigner.plan import Plan


class Share:
    """What one rank holds under a plan. Nothing else of the model is built.

    Args:
        graph: The model's partitions.
        plan: Who holds which.
        worker: This rank's worker; None: it holds nothing.
        device: Where its weights lie.

    Attributes:
        partitions: The names of its partitions, in the order in which it runs them.
        modules: Their forwards, with their weights.
        parameters: Its parameters, each once, by the first of its names in the model.
        buffers: Its persistent buffers by name.
    """

    def __init__(self, graph: PartitionGraph, plan: Plan, worker: str | None, device: torch.device) -> None:
        stages = [stage for stage in plan.stages if stage.worker == worker]
        self.partitions = tuple(name for stage in stages for name in stage.partitions)
        self.modules = graph.build(self.partitions, device)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        for name in self.partitions:
            piece, module = graph.piece[name], self.modules[name]
            parameters = {graph.canonical[each]: module.get_parameter(each) for each in piece.parameters}
            buffers = {each: module.get_buffer(each) for each in piece.buffers}
            self.parameters.update(parameters)
            self.buffers.update({each: buffer for each, buffer in buffers.items() if each in graph.persistent})
            self._held[name] = {**parameters, **buffers}

    def held_by(self, partition: str) -> dict[str, torch.Tensor]:
        """All tensors of a partition of this rank, also the buffers that no checkpoint has."""
        return self._held[partition]

    def frozen(self) -> dict[str, nn.Parameter]:
        """Have the parameters want no gradient any more; none of them is trained."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's own names; a shared parameter by its first name."""
        return {**self.parameters, **self.buffers}
