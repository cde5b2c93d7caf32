"""The parameters and buffers of a partition, whichever its modules hold now: a forward may assign others to them."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.runtime.forward.heldtensors import is_strided

if TYPE_CHECKING:
    from collections.abc import Iterator

_version = operator.attrgetter("_version")


class ModuleTensors:
    """Those of one partition.

    Args:
        module: The partition.

    Attributes:
        modules: Its modules, each once.
        now: Those whose memory can be replaced and whose changes torch counts, as `renewed` found them; each once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.modules = list(module.modules())
        self._spaces: list[dict[str, Any]] = [
            space for each in self.modules for space in (each._parameters, each._buffers)
        ]
        self._values = [space.values() for space in self._spaces]
        self._places: list[tuple[int, str]] = []
        self._held: list[torch.Tensor | None] = []
        self.now: list[torch.Tensor] = []

    def renewed(self) -> list[torch.Tensor] | None:
        """See which tensors the modules hold now.

        Returns:
            Those that they no longer hold; None: the modules hold what they did.
        """
        held = list(itertools.chain.from_iterable(self._values))
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return None
        before = {id(each): each for each in self._held if each is not None}
        present = {id(each): each for each in held if each is not None}
        self._places, self._held = [(id(space), name) for space in self._spaces for name in space], held
        self.now = [each for each in present.values() if is_strided(each)]
        return [each for key, each in before.items() if key not in present]

    def places(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        """Where modules held each of `now` when `renewed` looked: a key that the next tensor there has too."""
        known = {id(each) for each in self.now}
        for place, tensor in zip(self._places, self._held, strict=True):
            if tensor is not None and id(tensor) in known:
                yield place, tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them."""
        return any(each is tensor for each in self.now)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Where the modules hold a tensor, in words."""
        for name, module in self._module.named_modules():
            for key, each in (module._parameters | module._buffers | module.__dict__).items():
                if each is tensor:
                    return f"{name}.{key}" if name else key
        return "a tensor that its modules keep"

    def gradients(self) -> list[tuple[int, int]]:
        """Which gradients the parameters have, and torch's count of the changes to them."""
        found = [each.grad for each in self.now if isinstance(each, nn.Parameter)]
        return [(0, 0) if each is None else (id(each), each._version) for each in found]

    def counts(self) -> list[int]:
        """What torch counts of changes, and where values lie: `.data = ` counts as no change."""
        return [*map(_version, self.now), *map(torch.Tensor.data_ptr, self.now)]

    def changed(self, before: list[int], after: list[int]) -> list[torch.Tensor]:
        """The tensors whose counts differ; both lists are of the same tensors."""
        half = len(self.now)
        return [
            tensor for n, tensor in enumerate(self.now) if (before[n], before[half + n]) != (after[n], after[half + n])
        ]
