"""Modules that a forward moves or converts while it is captured, by `Module.to` and its kin.

torch writes each tensor anew also where `.to(x.device)` finds it there already, and a capture's tensors cannot be
written so. A call that changes neither type nor values is none, then; every rank moves its own partitions itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import MarkingError
from assigner.model.marking.opaque import is_elsewhere, within_call
from assigner.model.members import buffers, parameters
from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Callable

_MOVING = ("Module.to.", "Module.cuda.", "Module.cpu.", "Module.ipu.", "Module.xpu.")
"""Methods of torch's whose function gives a tensor with the values of the one that it is given."""


def unmoved(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """In the place of `Module._apply`.

    Raises:
        MarkingError: code between partitions converts a module, or changes what it holds.
    """

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **words: Any) -> Any:
        if is_elsewhere():
            return original(module, function, *args, **words)
        own = [*parameters(module), *buffers(module)]
        with torch.no_grad(), _disable_current_modes():
            if all(_is_left(each, function) for each in own):
                return module
        if within_call():
            return original(module, function, *args, **words)
        raise MarkingError(
            f"the forward converts the weights of a {type(module).__name__} outside its partitions, at"
            f" {running_line()}",
            hint="leave that out: each rank moves its own partitions to its device. Convert types in the model's"
            " builder, or compute with a converted tensor, weight.to(dtype)",
        )

    return apply


def _is_left(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a function leaves a tensor as it is, wherever that lies."""
    before = tensor._version
    made = function(tensor)
    if made is tensor:
        return tensor._version == before
    is_moved = getattr(function, "__module__", "") == nn.Module.__module__ and function.__qualname__.startswith(_MOVING)
    return is_moved and (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
