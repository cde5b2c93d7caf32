"""Partitions on their way to other workers in the middle of a run, with all that belongs to them.

    old plan   rank 0: a b    rank 1: c d          each rank that loses a partition sends weights, running statistics
    new plan   rank 0: a      rank 1: c   rank 2: b d      and optimizer state of it to the one that gets it

What travels is safetensors and JSON, partition by partition: nothing in it can run code, and a rank holds no more than
one partition twice beside its own. Of several workers that share a partition the first one sends it, and all that get
it receive it. A parameter that several partitions share goes with each of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from assigner.location import Location
from assigner.runtime.attributes import packed_attributes
from assigner.runtime.optimizerstate import OptimizerState
from assigner.runtime.plainvalues import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.runtime.localpartitions import LocalPartitions
    from assigner.runtime.optimizer import PipelineOptimizer
    from assigner.runtime.transport import Transport


@dataclass(frozen=True)
class RelocatedState:
    """What belongs to one partition.

    Args:
        state: Its parameters and buffers by the model's names.
        moments: The optimizer's state of its parameters.
        attributes: What forwards have changed on its modules.
    """

    state: dict[str, torch.Tensor]
    moments: OptimizerState
    attributes: dict[str, Any]

    @classmethod
    def of(cls, partition: str, share: LocalPartitions, optimizer: PipelineOptimizer) -> RelocatedState:
        """A partition's luggage, on the rank that holds it."""
        state = share.held_by(partition)
        parameters = {name: share.parameters[name] for name in state if name in share.parameters}
        moments = OptimizerState.of(parameters, optimizer)
        return cls({name: tensor.detach() for name, tensor in state.items()}, moments, share.attributes(partition))

    def packed(self) -> tuple[bytes, bytes]:
        """As bytes: the tensors, and the rest.

        Raises:
            UsageError: an attribute cannot be packed.
        """
        kept, plain = packed_attributes(self.attributes)
        tensors = {f"state/{name}": tensor for name, tensor in self.state.items()}
        tensors.update({f"moments/{name}": tensor for name, tensor in self.moments.tensors.items()})
        tensors.update({f"attributes/{name}": tensor for name, tensor in kept.items()})
        apart = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        return save(apart), json.dumps({"moments": self.moments.plain, "attributes": plain}).encode()

    def unpack(self, partition: str, share: LocalPartitions, optimizer: PipelineOptimizer) -> None:
        """Put it where the partition is now."""
        share.put(partition, self.state, self.attributes)
        self.moments.add(share.parameters, optimizer)

    @classmethod
    def unpacked(cls, tensors: bytes, rest: bytes) -> RelocatedState:
        """From bytes."""
        found, plain = load(tensors), json.loads(rest)
        attributes = {name: from_json(value) for name, value in plain["attributes"].items()}
        return cls(
            _section(found, "state/"),
            OptimizerState(_section(found, "moments/"), plain["moments"], {}),
            {**attributes, **_section(found, "attributes/")},
        )


def _section(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def removals(old: Plan, new: Plan) -> Iterator[tuple[str, int, int]]:
    """(partition, the first rank that has it, a rank that gets it) of every partition that goes to a rank."""
    for partition, workers in new.holders.items():
        held = [Location.parse(worker).rank for worker in old.holders[partition]]
        for target in (Location.parse(worker).rank for worker in workers):
            if target not in held:
                yield partition, held[0], target


def relocate(
    old: Plan,
    new: Plan,
    share: LocalPartitions,
    optimizer: PipelineOptimizer,
    *,
    rank: int,
    transport: Transport | None,
) -> dict[str, RelocatedState]:
    """Send what leaves this rank and receive what comes to it; every rank calls this.

    Args:
        old: Who holds what now.
        new: Who shall hold what.
        share: What this rank holds now.
        optimizer: With the state.
        rank: This rank.
        transport: None: there are no other ranks.

    Returns:
        The luggage of every partition that this rank holds under the new plan.

    Raises:
        LostConnectionError: a rank is gone.
    """
    found: dict[str, RelocatedState] = {}
    for partition in share.partitions:
        if rank in (Location.parse(worker).rank for worker in new.holders[partition]):
            found[partition] = RelocatedState.of(partition, share, optimizer)
    for partition, source, target in removals(old, new):
        assert transport is not None
        if rank == source:
            for part in RelocatedState.of(partition, share, optimizer).packed():
                transport.put(part, target)
            transport.flush()
        elif rank == target:
            found[partition] = RelocatedState.unpacked(transport.get(source), transport.get(source))
    return found
