"""Partitions on their way to other workers in the middle of a run, with all that belongs to them.

    old plan   rank 0: a b    rank 1: c d          each rank that loses a partition sends weights, running statistics
    new plan   rank 0: a      rank 1: c   rank 2: b d      and optimizer state of it to the one that gets it

What travels is safetensors and JSON, partition by partition: nothing in it can run code, and a rank holds no more than
one partition twice beside its own. Of several workers that share a partition the first one sends it, and all that get
it receive it. A parameter that several partitions share goes with each of them. The optimizer's state goes from who
updates a parameter under the old plan to who does under the new one, whoever holds the parameter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from assigner.location import rank_of
from assigner.model.plainvalues import from_json
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.runtime.forward.attributes import packed_attributes
from assigner.runtime.stages.updaters import updaters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.runtime.messages.transport import Transport
    from assigner.runtime.stages.localpartitions import LocalPartitions
    from assigner.runtime.update.optimizer import PipelineOptimizer


@dataclass(frozen=True)
class RelocatedState:
    """What belongs to one partition.

    Args:
        state: Its parameters and buffers by the model's names.
        attributes: What forwards have changed on its modules.
        frozen: The names of its parameters that want no gradient: a script may freeze some in the middle.
    """

    state: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    frozen: frozenset[str]

    @classmethod
    def of(cls, partition: str, share: LocalPartitions) -> RelocatedState:
        """A partition's luggage, on the rank that holds it."""
        state = {name: tensor.detach() for name, tensor in share.held_by(partition).items()}
        return cls(state, share.attributes(partition), share.frozen_of(partition))

    def packed(self) -> tuple[bytes, bytes]:
        """As bytes: the tensors, and the rest.

        Raises:
            UsageError: an attribute cannot be packed.
        """
        kept, plain = packed_attributes(self.attributes)
        tensors = {f"state/{name}": tensor for name, tensor in self.state.items()}
        tensors.update({f"attributes/{name}": tensor for name, tensor in kept.items()})
        return _saved(tensors), json.dumps({"attributes": plain, "frozen": sorted(self.frozen)}).encode()

    def unpack(self, partition: str, share: LocalPartitions) -> None:
        """Put it where the partition is now."""
        share.put(partition, self.state, self.attributes)
        share.freeze(partition, self.frozen)

    @classmethod
    def unpacked(cls, tensors: bytes, rest: bytes) -> RelocatedState:
        """From bytes."""
        found, plain = load(tensors), json.loads(rest)
        attributes = {name: from_json(value) for name, value in plain["attributes"].items()}
        kept = _section(found, "attributes/")
        return cls(_section(found, "state/"), {**attributes, **kept}, frozenset(plain["frozen"]))


def _saved(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})


def _section(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def removals(old: Plan, new: Plan) -> Iterator[tuple[str, int, int]]:
    """(partition, the first rank that has it, a rank that gets it) of every partition that goes to a rank."""
    for partition, workers in new.holders.items():
        held = [rank_of(worker) for worker in old.holders[partition]]
        for target in (rank_of(worker) for worker in workers):
            if target not in held:
                yield partition, held[0], target


def _state_removals(graph: PartitionGraph, old: Plan, new: Plan) -> Iterator[tuple[list[str], int, int]]:
    """(parameters, a rank that has the optimizer's state of them, a rank that gets it), partition by partition."""
    had, has = updaters(graph, old), updaters(graph, new)
    done: set[str] = set()
    for piece in graph.pieces:
        ways: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name in dict.fromkeys(graph.canonical[each] for each in piece.parameters):
            before = [rank_of(worker) for worker in had[name]]
            for target in (rank_of(worker) for worker in has[name]):
                if name not in done and target not in before:
                    ways[before[0], target].append(name)
            done.add(name)
        for (source, target), names in ways.items():
            yield names, source, target


@dataclass(frozen=True)
class Luggage:
    """What a rank holds under its new plan.

    Args:
        partitions: What belongs to each of its partitions.
        moments: The optimizer's state of the parameters that it updates.
    """

    partitions: dict[str, RelocatedState]
    moments: list[OptimizerState]

    def unpack(self, share: LocalPartitions, optimizer: PipelineOptimizer) -> None:
        """Put it in its place."""
        for partition, each in self.partitions.items():
            each.unpack(partition, share)
        for moments in self.moments:
            moments.add(share.updated, optimizer)


def relocate(
    graph: PartitionGraph,
    old: Plan,
    new: Plan,
    share: LocalPartitions,
    optimizer: PipelineOptimizer,
    *,
    rank: int,
    transport: Transport | None,
) -> Luggage:
    """Send what leaves this rank and receive what comes to it; every rank calls this.

    Args:
        graph: The model's partitions.
        old: Who holds what now.
        new: Who shall hold what.
        share: What this rank holds now.
        optimizer: With the state.
        rank: This rank.
        transport: None: there are no other ranks.

    Raises:
        LostConnectionError: a rank is gone.
    """
    found: dict[str, RelocatedState] = {}
    for partition in share.partitions:
        if rank in (rank_of(worker) for worker in new.holders[partition]):
            found[partition] = RelocatedState.of(partition, share)
    for partition, source, target in removals(old, new):
        assert transport is not None
        if rank == source:
            _send(transport, RelocatedState.of(partition, share).packed(), target)
        elif rank == target:
            found[partition] = RelocatedState.unpacked(transport.get(source), transport.get(source))
    after = updaters(graph, new)
    stay = {name: each for name, each in share.updated.items() if rank in (rank_of(worker) for worker in after[name])}
    moments = [OptimizerState.of(stay, optimizer)]
    for names, source, target in _state_removals(graph, old, new):
        assert transport is not None
        if rank == source:
            leaving = OptimizerState.of({name: share.updated[name] for name in names}, optimizer)
            _send(transport, (_saved(leaving.tensors), json.dumps(leaving.plain).encode()), target)
        elif rank == target:
            moments.append(OptimizerState(load(transport.get(source)), json.loads(transport.get(source)), {}))
    return Luggage(found, moments)


def _send(transport: Transport, parts: tuple[bytes, bytes], target: int) -> None:
    for part in parts:
        transport.put(part, target)
    transport.flush()
