"""What an optimizer of the user's keeps beside the state of its parameters, and neither a checkpoint nor a move takes.

self.state[parameter][...], numbers in groups    saved, and moved
self.count = 3                                   moved; saved where its own state_dict has it: refused
self.seen = [...], self.t = tensor, an optimizer inside, self.state["count"], a list in a group: refused
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import Memento
from assigner.runtime.update.separability import is_known

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECTIONS = frozenset(("state", "param_groups"))


class OptimizerMemory:
    """What an optimizer keeps, held against what it kept when it was made.

    Args:
        optimizer: Just made, over some parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        places = () if is_known(optimizer) else _places(optimizer)
        self._before = {name: (value, Memento((), [value])) for name, value in places}

    def check_moved(self) -> None:
        """Refuse to build it anew over other parameters where something would be lost.

        Raises:
            UsageError: it keeps something else than plain values of its own.
        """
        self._refuse("another plan would lose it", [name for name in self._changed() if "param_groups" not in name])

    def check_saved(self) -> None:
        """Refuse to save its state where its own `state_dict` has something that is not saved.

        Raises:
            UsageError: naming it.
        """
        if is_known(self._optimizer):
            return
        changed = self._changed()
        is_made = "_zero_grad_profile_name" in vars(self._optimizer)  # else it has no state_dict() of torch's either
        found = [name for name in changed if not (is_made and name.startswith("self."))]
        if type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            beyond = [key for key in self._optimizer.state_dict() if key not in _SECTIONS]
            found += [f"{key!r} of its own state_dict()" for key in beyond]
        self._refuse("a checkpoint of a pipeline would lose it", found)

    def _changed(self) -> list[str]:
        """The places where it keeps something now that it did not keep when it was made."""
        found = [f"state[{key!r}]" for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        if is_known(self._optimizer):
            return found
        for name, value in _places(self._optimizer):
            held, memento = self._before.get(name, (None, None))
            is_inner = isinstance(value, torch.optim.Optimizer)
            if is_inner or memento is None or held is not value or memento.has_changed():
                found.append(name)
        return found

    def _refuse(self, what: str, found: list[str]) -> None:
        if found:
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps {found[0]} beside the state of its parameters: {what}",
                hint="keep it as a number in each param group, or as a tensor in the state of each parameter",
            )


@functools.cache
def _of_torch() -> frozenset[str]:
    """What every optimizer has."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros((), device="cpu")])), *_SECTIONS, "defaults"))


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Its own attributes, and what stands in its groups and is not carried, by names for people."""
    for name, value in vars(optimizer).items():
        if name not in _of_torch() and _is_kept(value):
            yield f"self.{name}", value
    for n, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            is_number = isinstance(value, torch.Tensor) and not value.dim()
            if name not in {"params", "param_names"} and not is_number and _is_kept(value):
                yield f"param_groups[{n}][{name!r}]", value


def _is_kept(value: Any) -> bool:
    """Something that may change, and is no plain value: neither a function, nor a list of parameters."""
    if type(value) in ATOMS or callable(value):
        return False
    if isinstance(value, tuple):
        return any(map(_is_kept, value))
    return not (isinstance(value, list) and value and all(isinstance(each, nn.Parameter) for each in value))
