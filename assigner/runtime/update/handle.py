"""What a script sets and reads on the optimizer's handle goes to the optimizer that runs, where that can be.

    optimizer.state = defaultdict(dict)      on every rank's own: each has the state of its parameters
    optimizer.strength *= 0.5                likewise: all of them were built with the number that is read
    optimizer.first_step(zero_grad=True)     on one rank alone: on several it would see the parameters of one

What the script sets is compared between the ranks, as their calls are.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OF_EVERY_ONE = ("param_groups", "state", "defaults")
"""What every optimizer has: the handle has that of the one that runs."""


class UnsharedAttributeError(UsageError, AttributeError):
    """What an optimizer has on one rank, it may have otherwise on another; `hasattr` and `getattr` find nothing."""


def is_plain(value: Any) -> bool:
    """A setting that all ranks can compare; a tensor would have to be waited for."""
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple) and all(isinstance(each, bool | int | float | str | None) for each in value)
    )


class OptimizerHandle(torch.optim.Optimizer):
    """The attributes of an optimizer that another one stands for.

    Attributes:
        local: The optimizer that runs on this rank.
    """

    local: torch.optim.Optimizer
    _made = False
    _ranks: int
    _first: dict[str, Any]  # plain values that `local` was built with
    _given: dict[str, Any]  # what the script has set
    _note: Callable[[str], None]
    _called: Callable[[str], None]

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    def _stand_for_local(self) -> None:
        """From now on it is scripts that set what the handle has not of its own."""
        for name in _OF_EVERY_ONE:
            vars(self).pop(name, None)
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Have it, or give it to the optimizer that runs, for which a script sets it.

        The handle keeps what it has of its own, and what torch hangs on it, as a scheduler its wrap around `step`.

        Raises:
            UsageError: `param_groups` are none that a script may put there.
        """
        is_own = not self._made or name in vars(self) or hasattr(type(self), name)
        if is_own or (name.startswith("_") and not hasattr(self.local, name)):
            super().__setattr__(name, value)
            return
        if name == "param_groups":
            self._check_groups(value)
        self._note(f"optimizer.{name} = {repr(value) if is_plain(value) else '...'}")
        setattr(self.local, name, value)
        if name not in _OF_EVERY_ONE:
            self._given[name] = value

    def __delattr__(self, name: str) -> None:
        """Of what `__setattr__` has set, where it is."""
        if name not in self._given:
            super().__delattr__(name)
            return
        self._note(f"del optimizer.{name}")
        delattr(self.local, name)
        del self._given[name]

    def __getattr__(self, name: str) -> Any:
        """What the optimizer that runs has: what it was built with, what the script has set, and its methods.

        On several ranks there are several of it. Modes, as schedule-free ones have them (`train()` and `eval()`), are
        each one's own.

        Raises:
            UnsharedAttributeError: what it has of this rank's parameters alone.
        """
        local = vars(self).get("local")
        if local is None or not hasattr(local, name) or (name.startswith("_") and name not in self._given):
            raise AttributeError(f"{type(local or self).__name__!r} object has no attribute {name!r}")
        found = getattr(local, name)
        if name in _OF_EVERY_ONE:
            return found
        if inspect.ismethod(found) and found.__self__ is local:
            is_mode = name in ("train", "eval")
            if self._ranks > 1 and not is_mode:
                raise UnsharedAttributeError(
                    f"{type(local).__name__}.{name}() would see the parameters of this rank, and the run has"
                    f" {self._ranks} ranks",
                    hint="have Workload.optimizer or step() call it; or train under a plan on one worker"
                    " (assigner solve --max-workers 1), on one rank",
                )
            return functools.partial(self._call, name, self._note if is_mode else self._called, found)
        first = self._first.get(name, getattr(type(local), name, self))
        if self._ranks > 1 and found is not self._given.get(name, first):
            raise UnsharedAttributeError(
                f"{type(local).__name__}.{name} is what it has made of the parameters of this rank, and the run has"
                f" {self._ranks} ranks",
                hint="numbers in param groups are the same on all ranks, and so is what the script sets on all of them",
            )
        return found

    @staticmethod
    def _call(name: str, note: Callable[[str], None], method: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """A method of the optimizer that runs, for the script."""
        note(f"optimizer.{name}()")
        return method(*args, **settings)
