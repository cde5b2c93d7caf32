"""Partitions on their way to other workers in the middle of a run, with all that belongs to them.

    old plan   rank 0: a b    rank 1: c d          each rank that loses a partition sends weights, running statistics
    new plan   rank 0: a      rank 1: c   rank 2: b d      and optimizer state of it to the one that gets it

What travels is packed as all that ranks hand each other (`packedvalues`), partition by partition: nothing in it can run
code, and a rank holds no more than one partition twice beside its own. Of several workers that share a partition the
first one sends it, and all that get it receive it. A parameter that several partitions share goes with each of them.
The optimizer's state goes from who updates a parameter under the old plan to who does under the new one, whoever holds
the parameter.

What cannot go with them, as what their code holds from outside, is in `outsidevalues`. And what the script holds of the
earlier plan's memory, and writes there, reaches the model no more:

    view = weight.data.view(-1)         an alias knows nothing of its weight, and cannot be watched as that is
    gradients = [weight.grad, ...]      under the new plan the weight has another one
    moment = optimizer.state[weight]["exp_avg"]
    state = optimizer.state[weight]     empty, where the weight has left its rank

A variable that a loop has left over holds memory as well, and does no harm. So that is a warning and no error.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from assigner.location import rank_of
from assigner.model.deferred.mutation import storage_of
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

_OWN = 2  # a tensor's own hold on its memory, and that of the object that is asked
_STATE = "the optimizer's state of {}"
_MOST = 3
"""So many tensors are named."""


@dataclass(frozen=True)
class RelocatedState:
    """What belongs to one partition.

    Args:
        attributes: What forwards have changed on its modules.
        frozen: The names of its parameters that want no gradient: a script may freeze some in the middle.
        gradients: Those of its parameters to which the next step adds.
    """

    state: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    frozen: list[str]
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, partition: str, share: LocalPartitions) -> RelocatedState:
        """What goes with a partition, on the rank that holds it."""
        state = {name: tensor.detach() for name, tensor in share.held_by(partition).items()}
        parameters = share.parameters_of(partition)
        frozen = [name for name, each in parameters.items() if not each.requires_grad]
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        return cls(state, share.attributes(partition), frozen, gradients)

    def packed(self) -> PackedValue:
        """For another rank; its attributes can go there (`LocalPartitions.check_leaving`)."""
        parts = {"state": self.state, "attributes": self.attributes, "gradients": self.gradients}
        bare = {part: {name: _bare(each) for name, each in some.items()} for part, some in parts.items()}
        return PackedValue.of({**bare, "frozen": self.frozen}, "a partition")

    def unpack(self, partition: str, share: LocalPartitions) -> None:
        """Put it where the partition is now."""
        share.put(partition, self.state, self.attributes)
        share.freeze(partition, self.frozen)
        for name, parameter in share.parameters_of(partition).items():
            parameter.grad = self.gradients[name].to(parameter.device) if name in self.gradients else None

    @classmethod
    def unpacked(cls, packed: PackedValue) -> RelocatedState:
        """What another rank has packed."""
        return cls(**packed.value)


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
    new: Plan, share: LocalPartitions, optimizer: RankOptimizer, member: Membership
) -> tuple[dict[str, RelocatedState], list[OptimizerState]]:
    """Send what leaves this rank under a new plan and receive what comes to it; every rank calls this.

    Returns:
        What belongs to each partition that this rank is to hold, and the optimizer's state of what it is to update.

    Raises:
        LostConnectionError: a rank is gone.
    """
    rank, old = member.rank, share.plan
    found: dict[str, RelocatedState] = {}
    for partition in share.partitions:
        if rank in (rank_of(worker) for worker in new.holders[partition]):
            found[partition] = RelocatedState.of(partition, share)
    for partition, source, target in removals(old, new):
        if rank == source:
            send_value(member, RelocatedState.of(partition, share).packed(), [target])
        elif rank == target:
            found[partition] = RelocatedState.unpacked(receive_value(member, source))
    after = updaters(share.graph, new)
    stay = {name: each for name, each in share.updated.items() if rank in (rank_of(worker) for worker in after[name])}
    moments = [OptimizerState.of(stay, optimizer)]
    for names, source, target in _state_removals(share.graph, old, new):
        if rank == source:
            leaving = OptimizerState.of({name: share.updated[name] for name in names}, optimizer)
            tensors = {key: _bare(each) for key, each in leaving.dense.items()}
            packed = PackedValue.of([tensors, json.dumps(leaving.plain)], "the optimizer's state")
            send_value(member, packed, [target])
        elif rank == target:
            tensors, plain = receive_value(member, source).value
            moments.append(OptimizerState(tensors, json.loads(plain)))
    return found, moments


class _Part(NamedTuple):
    """A tensor of the model's training, without a hold on it.

    Args:
        watched: It, where a script that uses it is told so.
    """

    words: str
    memory: StorageWeakRef
    watched: weakref.ref[torch.Tensor] | None = None

    def is_held(self) -> bool:
        """Somebody has its memory, beside the tensor that is watched."""
        tensor = self.watched() if self.watched is not None else None
        if tensor is None:
            return not self.memory.expired()  # type: ignore[no-untyped-call]
        return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _OWN)


class EarlierMemory:
    """The memory of a rank's parameters, buffers, gradients and moments under a plan that it is to leave."""

    def __init__(self, share: LocalPartitions, optimizer: RankOptimizer) -> None:
        built = ((name, each) for name, each in share.built().items() if each.layout is torch.strided)
        self._parts = [_Part(name, _memory(each), weakref.ref(each)) for name, each in built]
        self._parts += [_Part(words, _memory(each)) for words, each in _beside(share, optimizer)]
        states = ((name, optimizer.state.get(each)) for name, each in share.parameters.items())
        self._states = [("", {}), *((_STATE.format(name), each) for name, each in states if isinstance(each, dict))]

    def warn(self, share: LocalPartitions, optimizer: RankOptimizer, but: Any) -> None:
        """Tell in a line what of it the script holds, once this program has dropped it all.

        Args:
            share: The rank's partitions under the new plan.
            optimizer: As it is now.
            but: What forwards go on with: values in which some of the buffers may be.
        """
        with torch._C.DisableTorchFunctionSubclass():
            live = [*share.held().values(), *(each for _, each in _beside(share, optimizer)), *pytree.tree_leaves(but)]
            known = {storage_of(each) for each in live if isinstance(each, torch.Tensor)}
            held = (each for each in self._parts if each.memory.cdata not in known and each.is_held())
            found = [*dict.fromkeys([*(each.words for each in held), *self._held_states(optimizer)])]
        if found:
            more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
            warnings.warn(
                f"the script still holds memory of {', '.join(found[:_MOST])}{more} from before pipeline.move: under"
                " the new plan the model has other memory, and what is written to this one does not reach it; take"
                " tensors anew from pipeline.named_parameters() and pipeline.optimizer after each move, or `del` them",
                stacklevel=5,  # the script's line: `move` is decorated twice
            )

    def _held_states(self, optimizer: RankOptimizer) -> Iterator[str]:
        """The states that the script holds and the optimizer has no more; the first, which nobody has, is compared."""
        now = {id(each) for each in optimizer.state.values()}
        nobody, *states = range(len(self._states))
        for n in states:
            is_held = sys.getrefcount(self._states[n][1]) > sys.getrefcount(self._states[nobody][1])
            if is_held and id(self._states[n][1]) not in now:
                yield self._states[n][0]


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _beside(share: LocalPartitions, optimizer: RankOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of parameters, and what the optimizer keeps of them, in words."""
    for name, parameter in share.parameters.items():
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            yield f"the gradient of {name}", parameter.grad
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield _STATE.format(name), value
