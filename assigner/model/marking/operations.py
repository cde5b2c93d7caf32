"""Which operations a forward runs, in which order and on what: ranks compare it, for each runs its own copy of them.

A forward that goes over a set has an order of its own in each process: of texts by their hashes, of modules by their
addresses. It runs the same operations everywhere, in another order or on others' results. Where ranks do not even run
the same ones, there is another reason: an operation that this machine has, or a text that they may have unlike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.model.deferred.origins import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


class Operations:
    """Those of one forward on tensors without values, as its code calls them; what torch makes of them does not count.

    Args:
        known: By id, the names of the tensors that it is given, and of its parameters and buffers.
    """

    def __init__(self, known: Mapping[int, str]) -> None:
        self._names = {**known}
        self._kept: list[Any] = []  # an id stays that of one tensor
        self._kinds: list[str] = []
        self._calls: list[str] = []

    def note(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """One was called. A question, as for a shape, is none."""
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not made and result is not None:
            return
        leaves = pytree.tree_leaves((args, sorted(kwargs.items())))
        kind = " ".join((_name(function), *map(_plain, leaves)))
        read = [self._names.get(id(each), "") for each in leaves if isinstance(each, torch.Tensor)]
        for each in made:
            self._names.setdefault(id(each), str(len(self._kept)))
            self._kept.append(each)
        self._kinds.append(kind)
        self._calls.append(f"{kind} {read}")

    @property
    def order(self) -> tuple[int, int]:
        """Of what it runs, and of how that follows each other, which is alike where forwards are."""
        return digest(sorted(self._kinds)), digest(self._calls)


def _name(function: Any) -> str:
    """That of a function, or of the attribute that one is there for."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name} {getattr(function.__self__, '__name__', '')}" if name in ("__get__", "__set__") else name


def _plain(leaf: Any) -> str:
    """A number or a text; of all else its kind: where things are, and what symbols are called, may differ."""
    if isinstance(leaf, slice):
        return ":".join(map(_plain, (leaf.start, leaf.stop, leaf.step)))
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
