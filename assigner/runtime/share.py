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
        rematerialise: Those that the plan rematerialises.
        parameters: Its parameters, each once, by the first of its names in the model.
        buffers: Its persistent buffers by name.
    """

    def __init__(self, graph: PartitionGraph, plan: Plan, worker: str | None, device: torch.device) -> None:
        stages = [stage for stage in plan.stages if stage.worker == worker]
        self.partitions = tuple(name for stage in stages for name in stage.partitions)
        self.rematerialise = frozenset(name for stage in stages for name in stage.rematerialise)
        self.modules = graph.build(self.partitions, device)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name in self.partitions:
            piece, module = graph.piece[name], self.modules[name]
            self.parameters.update({graph.canonical[each]: module.get_parameter(each) for each in piece.parameters})
            self.buffers.update({each: module.get_buffer(each) for each in piece.buffers if each in graph.persistent})

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's own names; a shared parameter by its first name."""
        return {**self.parameters, **self.buffers}
