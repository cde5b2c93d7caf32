"""Automatic mixed precision: capture, training and profiling run a model's operations under the same autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError
from assigner.model.plainvalues import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


def casting(autocast: str | None, device_type: str) -> AbstractContextManager[object]:
    """`torch.autocast` to the type that `autocast` names, on a type of device; None: nothing is cast."""
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, autocast))


def refuse_other_casting(autocast: str | None, device_type: str) -> None:
    """Ranks have agreed on the types that they send each other, by the workload's own autocast.

    Raises:
        UsageError: the caller's code runs under `torch.autocast` to another type.
    """
    said = dtype_name(torch.get_autocast_dtype(device_type))
    if torch.is_autocast_enabled(device_type) and said != autocast:
        raise UsageError(
            "torch.autocast is on where the pipeline is called: what ranks send each other would be of other types"
            " than they expect",
            hint=f"Workload(autocast={said!r}), and call the pipeline outside of torch.autocast",
        )


@contextlib.contextmanager
def casting_within(autocast: str | None) -> Iterator[None]:
    """`casting` on the CPU for a forward that runs inside an operator's implementation.

    There, composite operations (einsum, cross_entropy) reach the fake tensors whole: the operations in them would not
    be cast, and some come out with the wrong shape (torch 2.13: an nll_loss without reduction is a scalar). With the
    autograd keys back they are taken apart above autocast, as in an ordinary forward.
    """
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        casting(autocast, "cpu"),
    ):
        yield
