"""Random draws that do not depend on the placement: the generator is seeded anew for each partition and micro-batch."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def partition_seed(seed: int, step: int, partition: str, micro_batch: int) -> int:
    """The seed of one partition's forward on one micro-batch of one step; its recompute gets the same."""
    text = f"{seed}/{step}/{partition}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the default generator of the CPU, and of the device if it is another."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were."""
    state = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
