"""Automatic mixed precision: capture, training and profiling run a model's operations under the same autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


def casting(autocast: str | None, device_type: str) -> AbstractContextManager[object]:
    """`torch.autocast` to the type that `autocast` names, on a type of device; None: nothing is cast."""
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, autocast))


@contextlib.contextmanager
def casting_within(autocast: str | None) -> Iterator[None]:
    """`casting` on the CPU for a forward that runs inside an operator's implementation.

    There, composite operations (einsum) reach the fake tensors whole, and the operations in them would not be cast;
    with the autograd keys back they are taken apart above autocast, as in an ordinary forward.
    """
    if autocast is None:
        yield
        return
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        casting(autocast, "cpu"),
    ):
        yield
