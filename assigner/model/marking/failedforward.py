"""Where a forward has failed, in words: the line of the user's, or where there is none the module and its tensors."""

from __future__ import annotations

import contextlib
import traceback

import torch
from torch import nn

from assigner.model.plainvalues import dtype_name
from assigner.usercode import UNKNOWN, user_line

_MOST = 100  # characters of what a module says of itself


def failed_at(error: BaseException) -> str:
    """`at FILE:LINE (code)`; in a library's module that no line of the user's has called, what that was given.

        in Linear(in_features=8, out_features=16, bias=True), given float32[4, 6]

    Args:
        error: What the forward raised.
    """
    line = user_line(error)
    return _innermost(error) or f"at {line}" if line == UNKNOWN else f"at {line}"


def _innermost(error: BaseException) -> str:
    """The innermost module whose forward was running, and the tensors that it was called with; empty: there is none."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        code, module = frame.f_code, frame.f_locals.get("self")
        if code.co_name == "forward" and isinstance(module, nn.Module):
            arguments = (frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount])
            given = [f"{dtype_name(each.dtype)}{[*each.shape]}" for each in arguments if isinstance(each, torch.Tensor)]
            said = ""
            with contextlib.suppress(Exception):  # code of others, while one of their errors is told
                said = module.extra_repr()[:_MOST]
            name = f"{type(module).__name__}{said and f'({said})'}"
            return f"in {name}, given {', '.join(given)}" if given else f"in {name}"
    return ""
