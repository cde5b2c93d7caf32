"""Tensors as they were once. A tensor stays the same object, with its gradient: it is its memory that changes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from assigner.model.deferred.mutation import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(slots=True)
class HeldTensor:
    """A tensor as it is at one time: its values, and torch's count of the changes to it."""

    tensor: torch.Tensor
    data: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeldTensor:
        """A tensor as it is now."""
        return cls(tensor, tensor.data, tensor._version)

    def put(self) -> None:
        """Give the tensor these values; a graph that has saved it then takes it for unchanged."""
        self.tensor.data = self.data
        torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


def has_values_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """The same, to the last bit; where one is not a number, so must the other be."""
    if tensor.is_meta or other.is_meta or tensor.shape != other.shape:
        return False
    one, two = tensor.detach(), other.detach().to(tensor.device, tensor.dtype)
    return bool(((one == two) | ((one != one) & (two != two))).all())  # noqa: PLR0124 - NaN


@contextlib.contextmanager
def as_they_were(held: Sequence[HeldTensor]) -> Iterator[None]:
    """Tensors as they were once while the block runs; what it changes in them is dropped."""
    now = [HeldTensor.of(each.tensor) for each in held]
    for each in held:
        each.put()
    try:
        yield
    finally:
        for each in now:
            each.put()


def is_strided(tensor: torch.Tensor) -> bool:
    """True if a tensor's memory can be replaced and torch counts its changes."""
    return tensor.layout is torch.strided and not tensor.is_inference()


def apart_from(tensors: Iterable[torch.Tensor], values: Iterable[Any]) -> tuple[Any, ...]:
    """Values, of which those that lie in the memory of these tensors are copies."""
    held = {storage_of(each) for each in tensors}
    lie = [(each, isinstance(each, torch.Tensor) and storage_of(each) in held) for each in values]
    return tuple([each.clone().requires_grad_(each.requires_grad) if is_held else each for each, is_held in lie])


def on_copies(tensors: Sequence[torch.Tensor]) -> None:
    """Give tensors memory of their own with the values that they have; those that share a storage go on sharing one."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = like.set_(copies[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
