"""Automatic mixed precision: capture, training and profiling run a model's operations under the same autocast.

What else a script has on around its calls that would not reach a model's operations as in its own loop is refused.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack

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


def refuse_contexts(autocast: str | None, device_type: str) -> None:
    """Ranks have agreed on the types that they send each other, by the workload's own autocast.

    Raises:
        UsageError: the caller's code runs under `torch.autocast` to another type; with parametrisations cached, which
            forwards of micro-batches, recomputes and a capture would find of each other; or under a mode of the
            user's for torch's functions, of which graphs between partitions call others.
    """
    said = dtype_name(torch.get_autocast_dtype(device_type))
    if torch.is_autocast_enabled(device_type) and said != autocast:
        raise UsageError(
            "torch.autocast is on where the pipeline is called: what ranks send each other would be of other types"
            " than they expect",
            hint=f"Workload(autocast={said!r}), and call the pipeline outside of torch.autocast",
        )
    if parametrize._cache_enabled:
        raise UsageError(
            "torch.nn.utils.parametrize.cached() is on where the pipeline is called: what one forward has made of a"
            " weight the next micro-batch's, or the recompute, would go on with",
            hint="leave it out; or within the forward of the module that uses the weight more than once",
        )
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if not type(mode).__module__.startswith("torch."):
            raise UsageError(
                f"{type(mode).__name__}, a TorchFunctionMode, is on where the pipeline is called: between partitions"
                " runs what a capture has made of the model's code, and that calls other functions",
                hint="enter it within the forward of a marked module, and in the loss",
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
