"""Profiling changes nothing: what a process has set, and its random generators, are put back."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back Python's, numpy's and torch's generators, the grad mode, the default dtype and the thread count.

    A model's builder and its batches are the user's code, and may draw from any of them.
    """
    numpy = sys.modules.get("numpy.random")  # what was not loaded before has no state to keep
    drawn, numpy_drawn, torch_drawn = random.getstate(), numpy and numpy.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.set_state(numpy_drawn)
        torch.set_rng_state(torch_drawn)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
