"""The operations of a forward on fake tensors, listed as the nodes of a graph are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from assigner.model.deferred.mutation import Writes


class Listed(NamedTuple):
    """One operation, with fake tensors among what it is given and gives.

    Args:
        target: What is called.
        args: Its arguments.
        kwargs: Those by name.
        made: What it gives.
    """

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Any


@dataclass(frozen=True)
class Way:
    """What a call runs, on one of the ways that values may lead it.

    Args:
        operations: In turn.
        given: The tensors that it is given.
        made: Those that it returns.
        own: The parameters and buffers of its module, by name.
        counts: Of the changes to those that it is given and has, as it runs: of its own torch counts none.
    """

    operations: Sequence[Listed]
    given: Sequence[torch.Tensor]
    made: Sequence[torch.Tensor]
    own: Mapping[str, torch.Tensor]
    counts: tuple[int, ...] = field(init=False)

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
