"""A value on its way from one rank to the others: plain values as JSON, the tensors among them as they lie in memory.

    {"epoch": 3, "best": tensor}    ->    {"epoch": 3, "best": ["tensor", 0]}, its shape and type; its values

Nothing is pickled, and what comes out is the same on every rank, also on the one that it comes from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.model.plainvalues import DTYPES, dtype_name, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.runtime.ranks.membership import Membership

_SIMPLER = "share fewer and simpler values"
_PLAIN = "only plain, dense tensors go to other ranks"


@dataclass(frozen=True)
class PackedValue:
    """A value that is packed.

    Args:
        tensors: The tensors that it speaks of, contiguous and on the CPU.
    """

    text: str
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, value: Any, where: str) -> PackedValue:
        """A value, packed; tensors are copies. What cannot be packed is refused, in words that begin with `where`."""
        met: list[torch.Tensor] = []
        try:
            plain = to_json(value, where, met)
            for each in met:
                if type(each) not in (torch.Tensor, torch.nn.Parameter):
                    raise UsageError(f"a tensor in {where} is a {type(each).__name__}", hint=_PLAIN)
                refuse_unplain(each, f"a tensor in {where}")
            text = json.dumps([plain, [shape_and_type(each) for each in met]])
            return cls(text, tuple(copy_of(each) for each in met))
        except RecursionError as error:
            raise UsageError(f"{where} is nested too deeply, or holds itself", hint=_SIMPLER) from error
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{where} cannot be shared: {error}", hint=_SIMPLER) from error

    @property
    def value(self) -> Any:
        """What was packed."""
        return from_json(json.loads(self.text)[0], self.tensors)


def refuse_unplain(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor that has no values, or more to it than these; `where` is its name."""
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    what = (
        f"a {type(tensor).__name__}" if own
        else "nested" if tensor.is_nested
        else f"of layout {str(tensor.layout).removeprefix('torch.')}" if tensor.layout is not torch.strided
        else "quantised" if tensor.is_quantized
        else "on the meta device, and has no values" if tensor.is_meta
        else None
    )  # fmt: skip
    if what is not None:
        raise UsageError(f"{where} is {what}", hint=_PLAIN)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in memory of their own, contiguous and on the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def shape_and_type(tensor: torch.Tensor) -> list[Any]:
    """A tensor's shape and type, for JSON."""
    return [list(tensor.shape), dtype_name(tensor.dtype)]


def send(member: Membership, tensor: torch.Tensor, targets: Iterable[int]) -> None:
    """Send a tensor to some ranks but this one; it has left when this returns."""
    if member.transport is not None:
        for rank in targets:
            if rank != member.rank:
                member.transport.put_tensor(tensor, rank)
        member.transport.flush()


def receive(member: Membership, source: int, told: list[Any]) -> torch.Tensor:
    """A tensor that another rank sends, of which it has told this."""
    assert member.transport is not None
    shape, kind = told
    return member.transport.get_tensor(source, tuple(shape), DTYPES[kind])


def broadcast(member: Membership, source: int, parcel: PackedValue | None) -> Any:
    """What one rank has packed, on every rank; the parcels of others do not count."""
    if member.rank != source:
        return receive_value(member, source).value
    assert parcel is not None
    send_value(member, parcel, member.others)
    return parcel.value


def send_value(member: Membership, parcel: PackedValue, targets: Iterable[int]) -> None:
    """Send a packed value to some ranks but this one; it has left when this returns."""
    if member.transport is not None:
        for target in targets:
            member.transport.put(parcel.text.encode(), target)
            for tensor in parcel.tensors:
                member.transport.put_tensor(tensor, target)
        member.transport.flush()


def receive_value(member: Membership, source: int) -> PackedValue:
    """The packed value that another rank sends."""
    assert member.transport is not None
    text = member.transport.get(source).decode()
    return PackedValue(text, tuple(receive(member, source, told) for told in json.loads(text)[1]))
