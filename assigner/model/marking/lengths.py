"""`len(x)` of a tensor while a forward is captured: Python makes it a number, and the capture one for that size."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_NAME = "len"


def _length(value: Any) -> Any:
    """As `x.shape[0]`, which may be a symbol."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


@contextlib.contextmanager
def symbolic_lengths(model: nn.Module) -> Iterator[None]:
    """In the files of a model's forwards `len` gives symbols while the block runs; what is called `len` there stays."""
    forwards = (getattr(type(module), "forward", None) for module in model.modules())
    found = {id(names): names for each in forwards if (names := getattr(each, "__globals__", None)) is not None}
    files = [names for names in found.values() if _NAME not in names and names is not globals()]
    try:
        for names in files:
            names[_NAME] = _length
        yield
    finally:
        for names in files:
            names.pop(_NAME, None)
