"""Which operations a forward runs, in which order and on what: ranks compare it, for each runs its own copy of them.

A forward that goes over a set has an order of its own in each process: of texts by their hashes, of modules by their
addresses. It runs the same operations everywhere, in another order or on others' results. Where ranks do not even run
the same ones, there is another reason: an operation that this machine has, or a text that they may have unlike.

On fake tensors they are listed, too, as the nodes of a graph are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import Writes, tensor_leaves
from assigner.model.deferred.origins import digest

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


class Operations(TorchFunctionMode):
    """Notes those of one forward, as its code calls them; what torch makes of them does not count.

    A result is told by what has made it: which of two comes first is no matter, unless they write or draw.

    Args:
        known: By id, the names of the tensors that it is given, and of its parameters and buffers.
        writes: Sees what torch makes of them.

    Attributes:
        names: By id, what tensors are called: of those that are made, by what has made them.
    """

    def __init__(self, known: Mapping[int, str], writes: Writes) -> None:
        super().__init__()
        self.names, self._writes, self._effects = {**known}, writes, 0
        self._kept: list[Any] = []  # an id stays that of one tensor
        self._kinds: list[str] = []
        self._made: list[str] = []
        self._in_turn: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self.run(func, args, kwargs or {})
        self._note(func, args, kwargs or {}, made)
        return made

    def run(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What one gives."""
        return function(*args, **kwargs)

    def _note(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """One was called. A question, as for a shape, is none."""
        made = tensor_leaves(result if result is not None else args[:1])  # what sets something gives nothing
        if not made:
            return
        leaves = pytree.tree_leaves((args, sorted(kwargs.items())))
        kind = " ".join((_name(function), *map(_plain, leaves)))
        read = [self.names.get(id(each), "") for each in leaves if isinstance(each, torch.Tensor)]
        name = str(digest([kind, *read]))
        has_effect, self._effects = self._writes.effects != self._effects, self._writes.effects
        for n, each in enumerate(made):
            if has_effect or id(each) not in self.names:
                self.names[id(each)] = f"{name} {n}"
        self._kept += made
        self._kinds.append(kind)
        self._made.append(name)
        if has_effect:
            self._in_turn.append(name)

    def shown(self, returned: Sequence[torch.Tensor]) -> tuple[list[str], list[str]]:
        """By what the results are made, and what it has written or drawn, in turn; it may run more for its own sake."""
        return [self.names.get(id(each), "") for each in returned], self._in_turn

    def order(self, returned: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Of what it runs, and of how that follows each other, which is alike where forwards are."""
        results = [self.names.get(id(each), "") for each in returned]
        return digest(sorted(self._kinds)), digest([*sorted(self._made), *self._in_turn, *results])


def _name(function: Any) -> str:
    """That of a function, or of the attribute that one is there for."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name} {getattr(function.__self__, '__name__', '')}" if name in ("__get__", "__set__") else name


def _plain(leaf: Any) -> str:
    """A number or a text; of all else its kind: where things are, and what symbols are called, may differ."""
    if isinstance(leaf, slice):
        return ":".join(map(_plain, (leaf.start, leaf.stop, leaf.step)))
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


class Listed(NamedTuple):
    """One operation, with fake tensors among what it is given and gives."""

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Any


@dataclass(frozen=True)
class Way:
    """What a call runs, on one of the ways that values may lead it."""

    operations: Sequence[Listed]  # in turn
    given: Sequence[torch.Tensor]
    made: Sequence[torch.Tensor]  # those that it returns
    own: Mapping[str, torch.Tensor]  # the parameters and buffers of its module, by name
    counts: tuple[int, ...] = field(init=False)  # of the changes to `held`, as it runs: of its own torch counts none

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(each._version for each in self.held))

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it is given, and has."""
        return (*self.given, *self.own.values())


class ListedWrites(Writes):  # type: ignore[no-untyped-call]
    """Notes what is written, and keeps a list of all operations.

    Attributes:
        operations: These; of an operation that writes, what it is given is as it was before by its shape alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Listed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.append(Listed(func, args, kwargs or {}, made))
        return made
