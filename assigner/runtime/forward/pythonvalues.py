"""What a partition's forwards can find and change in Python beside tensors, and whether they run the user's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.model.deferred.caches import cached_functions
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.ownership import HOOKS, coded_classes, home_of, is_users
from assigner.model.deferred.reach import kept_objects, reach
from assigner.model.marking import PartitionModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from assigner.model.deferred.caches import Cached


class PythonValues:
    """Those that one partition's forwards can find."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = changeable_modules(module)
        self._caches: tuple[Cached, ...] | None = (
            None  # functions that keep what they make; None: no forward runs again
        )

    def now(self) -> Memento:
        """They, as they are now."""
        return Memento(self._modules, [self._caches] if self._caches else [], backwards=False)

    def for_recompute(self) -> Memento:
        """Likewise, for a forward that will run again from here: what cached functions keep counts from now on, too."""
        if self._caches is None:
            self._caches = tuple(cached_functions(self._modules))
        return self.now()

    def made(self) -> list[int]:
        """The ids of the objects that such functions have made so far: a recompute gets them as they are by then."""
        return [id(each) for cached in self._caches or () for each in kept_objects(cached)]


def changeable_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a partition whose Python values its forwards may change, by name."""
    layers = _layers(module)
    return layers if _have_user_code(layers) else []


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in module.named_modules() if not isinstance(each, PartitionModule)]


def has_user_code(module: nn.Module) -> bool:
    """Whether code of the user's runs in a partition: it may draw, keep values, and do anything else that Python can.

    It is a class, a hook or a function that is not torch's own: a layer may be given one.
    """
    return _have_user_code(_layers(module))


def _have_user_code(layers: Sequence[tuple[str, nn.Module]]) -> bool:
    return any(
        coded_classes(type(each)) or any(each.__dict__[hooks] for hooks in HOOKS) or "forward" in each.__dict__
        for _, each in layers
    ) or any(callable(each) and isinstance(of := home_of(each), str) and is_users(of) for _, each in reach({}, layers))
