"""Memory of an earlier plan that the script holds beyond a move: what it writes there reaches the model no more.

    view = weight.data.view(-1)         an alias knows nothing of its weight, and cannot be watched as that is
    gradients = [weight.grad, ...]      under the new plan the weight has another one
    moment = optimizer.state[weight]["exp_avg"]
    state = optimizer.state[weight]     empty, where the weight has left its rank

A variable that a loop has left over holds memory as well, and does no harm. So this is a warning and no error.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.runtime.stages.localpartitions import LocalPartitions
    from assigner.runtime.update.rankoptimizer import RankOptimizer

_OWN = 2  # a tensor's own hold on its memory, and that of the object that is asked
_STATE = "the optimizer's state of {}"
_MOST = 3
"""So many tensors are named."""


class _Part(NamedTuple):
    """A tensor of the model's training, without a hold on it.

    Args:
        words: What it is.
        memory: Its own.
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
    """The memory of a rank's parameters, buffers, gradients and moments under a plan that it is to leave.

    Args:
        share: The rank's partitions under it.
        optimizer: With the state of what the rank updates.
    """

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
                stacklevel=4,  # the script's line: `move` is decorated
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
