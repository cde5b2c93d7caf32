"""What a forward may not do to a value that it reads and others have made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules import module

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.model.marking import Piece, Value


class ReadValue(NamedTuple):
    """A value that a forward reads, and may not change.

    Args:
        value: Which.
        is_shared: Others read it too, and have it from elsewhere, or may.
    """

    value: Value
    is_shared: bool


Facts = tuple[int, bool, int, torch.Size, tuple[int, ...]]
"""What a forward can change of a tensor so that others with the same values do not see it: torch's count of the changes
to its values, whether it requires a gradient, where its values lie, and how."""

_VERSION, _HAS_GRADIENT, _MEMORY = 0, 1, slice(2, None)


def facts_of(tensor: torch.Tensor) -> Facts | None:
    """A tensor as it is now; None: torch does not say how it is, as of a sparse one."""
    if type(tensor) is not torch.Tensor:
        return None
    try:
        return tensor._version, tensor.requires_grad, tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:
        return None


def check_unchanged(
    piece: Piece,
    watched: Sequence[ReadValue],
    tensors: Sequence[torch.Tensor],
    before: Sequence[Facts | None],
    *,
    runs_again: bool = False,
) -> None:
    """Look at values that a forward has read.

    What a partition does to them would differ from plan to plan: those that are joined have one tensor for a value,
    those elsewhere one of their own, with the part of its gradient that comes from there; and what runs again finds the
    value as its first forward has left it. What a capture sees to be written is written to a copy.

    Args:
        piece: The partition.
        watched: The values.
        tensors: They.
        before: What they were before that forward.
        runs_again: It will be recomputed.

    Raises:
        UsageError: one is no longer what it was, as behind `x.detach_()`, `x.data = ...` or an `x.mul_(2)` that is new.
    """
    now = [facts_of(each) for each in tensors]
    if now == before:
        return
    for (value, is_shared), is_now, was in zip(watched, now, before, strict=True):
        if is_now is None or was is None or is_now == was:
            continue
        if is_now[_VERSION] != was[_VERSION]:
            raise _written_error(piece)
        if (is_now[_MEMORY] != was[_MEMORY] and (is_shared or runs_again)) or (
            is_now[_HAS_GRADIENT] != was[_HAS_GRADIENT] and is_shared and value.partition
        ):
            raise UsageError(
                f"the forward of partition {piece.name!r} changes a value that it reads in its shape or its memory, or"
                " in whether it has a gradient (detach_, set_, resize_, .data =): others that read the value have their"
                " own, and a recompute would change it once more",
                hint="change a value of the partition's own: x = x.detach()",
            )


def written_in_words(error: RuntimeError, piece: Piece, reads: Sequence[torch.Tensor]) -> RuntimeError | UsageError:
    """What to raise in the place of an error of torch's: a write to a leaf is none in the plain model."""
    is_of_leaf = "leaf Variable that requires grad" in str(error) and "in-place operation" in str(error)
    return _written_error(piece) if is_of_leaf and any(each.requires_grad for each in reads) else error


def _written_error(piece: Piece) -> UsageError:
    return UsageError(
        f"the forward of partition {piece.name!r} writes in place to a value that it reads (as x.mul_(2)), and did not"
        " when the model was captured: others that read the value have their own, and a recompute would write it once"
        " more",
        hint="write to a value of the partition's own: x = x.clone(); or write from the first forward on, as with a"
        " factor of 1",
    )


def check_hooks(piece: Piece, reads: Sequence[torch.Tensor]) -> None:
    """Look at the values that a forward has read which has hooked on to tensors.

    Args:
        piece: The partition.
        reads: What it has read.

    Raises:
        UsageError: it has hooked on to one that another partition has made: the hook would see the part of its gradient
            that comes from here, and twice where the forward runs again.
    """
    for value, tensor in zip(piece.reads, reads, strict=True):
        if value.partition and tensor._backward_hooks:
            who, hint = "", "hook on to it where it is made; or on a value of the partition's own, as x = x * 1"
            if on_all := [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]:
                who = f", or a hook on all modules ({getattr(on_all[0], '__qualname__', type(on_all[0]).__name__)}),"
                hint = (
                    "leave what hooks on to all modules, as FlopCounterMode and ModuleTracker do, for a plain model:"
                    f" it counts the same around workload.model(); a forward: {hint}"
                )
            raise UsageError(
                f"the forward of partition {piece.name!r}{who} hooks on to output {value.index} of partition"
                f" {value.partition!r}: the hook would not act once on the whole gradient",
                hint=hint,
            )
