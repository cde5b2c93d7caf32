"""Profiling changes nothing: what a process has set, and its random generators, are put back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from assigner.machine.generators import GeneratorStates

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back Python's, numpy's and torch's generators, the grad mode, the default dtype and the thread count.

    A model's builder and its batches are the user's code, and may draw from any of them.
    """
    drawn, torch_drawn = GeneratorStates.now(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        drawn.put_back()
        torch.set_rng_state(torch_drawn)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
