"""What a forward may not do to a value that it reads and others have made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules import module

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from assigner.model.marking import Piece

Facts = tuple[bool, int, tuple[int, ...], tuple[int, ...]]
"""What a forward can change of a value that it reads: `facts_of`."""


def facts_of(tensor: torch.Tensor) -> Facts:
    """What a forward can change of a tensor so that others with the same values do not see it."""
    return tensor.requires_grad, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def check_unchanged(piece: Piece, tensor: torch.Tensor, before: Facts) -> None:
    """Look at a value that others read elsewhere, when the forward of a joined partition has read it.

    What a partition does to it would differ from plan to plan: those that are joined have one tensor for a value, those
    elsewhere one of their own, with the part of its gradient that comes from there.

    Raises:
        UsageError: it is no longer what it was, as behind `x.detach_()` or `x.data = ...`.
    """
    if facts_of(tensor) != before:
        raise UsageError(
            f"the forward of partition {piece.name!r} changes a value that it reads in its shape or its memory, or in"
            " whether it has a gradient (detach_, set_, resize_, .data =): others that read the value have their own",
            hint="change a value of the partition's own: x = x.detach()",
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
