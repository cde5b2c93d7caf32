"""Partitions on their way to other workers in the middle of a run, with all that belongs to them.

    old plan   rank 0: a b    rank 1: c d          each rank that loses a partition sends weights, running statistics
    new plan   rank 0: a      rank 1: c   rank 2: b d      and optimizer state of it to the one that gets it

What travels is packed as all that ranks hand each other (`packedvalues`), partition by partition: nothing in it can run
code, and a rank holds no more than one partition twice beside its own. Of several workers that share a partition the
first one sends it, and all that get it receive it. A parameter that several partitions share goes with each of them.
The optimizer's state goes from who updates a parameter under the old plan to who does under the new one, whoever holds
the parameter.

What cannot go with them, as what their code holds from outside, is in `outsidevalues`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from assigner.location import rank_of
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.runtime.ranks.packedvalues import PackedValue, receive_value, send_value
from assigner.runtime.stages.updaters import updaters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.localpartitions import LocalPartitions
    from assigner.runtime.update.rankoptimizer import RankOptimizer


@dataclass(frozen=True)
class RelocatedState:
    """What belongs to one partition.

    Args:
        state: Its parameters and buffers by the model's names.
        attributes: What forwards have changed on its modules.
        frozen: The names of its parameters that want no gradient: a script may freeze some in the middle.
        gradients: Those of its parameters to which the next step adds.
    """

    state: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    frozen: frozenset[str]
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, partition: str, share: LocalPartitions) -> RelocatedState:
        """What goes with a partition, on the rank that holds it."""
        state = {name: tensor.detach() for name, tensor in share.held_by(partition).items()}
        found = {name: each.grad for name, each in share.parameters_of(partition).items()}
        gradients = {name: each for name, each in found.items() if each is not None}
        return cls(state, share.attributes(partition), share.frozen_of(partition), gradients)

    def packed(self) -> PackedValue:
        """For another rank; its attributes can go there (`LocalPartitions.check_leaving`)."""
        state, attributes, gradients = (
            {name: _bare(each) for name, each in some.items()} for some in (self.state, self.attributes, self.gradients)
        )
        frozen = sorted(self.frozen)
        return PackedValue.of(
            {"state": state, "attributes": attributes, "frozen": frozen, "gradients": gradients}, "a partition"
        )

    def unpack(self, partition: str, share: LocalPartitions) -> None:
        """Put it where the partition is now."""
        share.put(partition, self.state, self.attributes)
        share.freeze(partition, self.frozen)
        for name, parameter in share.parameters_of(partition).items():
            parameter.grad = self.gradients[name].to(parameter.device) if name in self.gradients else None

    @classmethod
    def unpacked(cls, packed: PackedValue) -> RelocatedState:
        """What another rank has packed."""
        found = packed.value
        return cls(found["state"], found["attributes"], frozenset(found["frozen"]), found["gradients"])


def _bare(value: Any) -> Any:
    """A tensor without a class of its own; another value as it is."""
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


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


def relocate(
    graph: PartitionGraph,
    old: Plan,
    new: Plan,
    share: LocalPartitions,
    optimizer: RankOptimizer,
    *,
    member: Membership,
) -> tuple[dict[str, RelocatedState], list[OptimizerState]]:
    """Send what leaves this rank and receive what comes to it; every rank calls this.

    Args:
        graph: The model's partitions.
        old: Who holds what now.
        new: Who shall hold what.
        share: What this rank holds now.
        optimizer: With the state.
        member: This process in the run.

    Returns:
        What belongs to each partition that this rank is to hold, and the optimizer's state of what it is to update.

    Raises:
        LostConnectionError: a rank is gone.
    """
    rank = member.rank
    found: dict[str, RelocatedState] = {}
    for partition in share.partitions:
        if rank in (rank_of(worker) for worker in new.holders[partition]):
            found[partition] = RelocatedState.of(partition, share)
    for partition, source, target in removals(old, new):
        if rank == source:
            send_value(member, RelocatedState.of(partition, share).packed(), [target])
        elif rank == target:
            found[partition] = RelocatedState.unpacked(receive_value(member, source))
    after = updaters(graph, new)
    stay = {name: each for name, each in share.updated.items() if rank in (rank_of(worker) for worker in after[name])}
    moments = [OptimizerState.of(stay, optimizer)]
    for names, source, target in _state_removals(graph, old, new):
        if rank == source:
            leaving = OptimizerState.of({name: share.updated[name] for name in names}, optimizer)
            tensors = {key: _bare(each) for key, each in leaving.tensors.items()}
            packed = PackedValue.of([tensors, json.dumps(leaving.plain)], "the optimizer's state")
            send_value(member, packed, [target])
        elif rank == target:
            tensors, plain = receive_value(member, source).value
            moments.append(OptimizerState(tensors, json.loads(plain)))
    return found, moments
