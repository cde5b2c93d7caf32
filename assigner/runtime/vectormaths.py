"""The first calls of vector maths in a process, which may go wrong where threads make them together.

Intel's MKL settles which code a function like the square root runs by when the function is first called. Where two
threads of one operation make that call at once, one of them may compute its part with a relative error near 3e-4
(https://github.com/pytorch/pytorch/issues/188792, with oneMKL 2024.2, which torch's own packages have). An optimizer's
first step is such a call. One element is never cut into parts, so that its call is made by one thread.
"""

from __future__ import annotations

import functools

import torch

_FUNCTIONS = (
    torch.acos, torch.asin, torch.atan, torch.ceil, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.erfinv,
    torch.exp, torch.expm1, torch.floor, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2, torch.round,
    torch.rsqrt, torch.sin, torch.sinh, torch.sqrt, torch.tan, torch.tanh, torch.trunc,
)  # fmt: skip


@functools.cache
def settle_vector_maths() -> None:
    """Call each function once with one element, in single and in double precision."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(one)
