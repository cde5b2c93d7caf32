"""Random draws that do not depend on the placement: the generator is seeded anew for each partition and micro-batch."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from assigner.machine.generators import GeneratorStates

if TYPE_CHECKING:
    from collections.abc import Iterator


def partition_seed(seed: int, step: int, partition: str, micro_batch: int) -> int:
    """The seed of one partition's forward on one micro-batch of one step; its recompute gets the same."""
    text = f"{seed}/{step}/{partition}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def backward_seed(seed: int, step: int, partition: str, micro_batch: int) -> int:
    """The seed of one partition's backward on one micro-batch, for hooks, Functions and recomputes that draw in it."""
    return partition_seed(seed, step, f"the backward of {partition}", micro_batch)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the default generator of the CPU, and of the device if it is another."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class DeviceStates(NamedTuple):
    """The states of the default generator of the CPU, and of a device if it is another."""

    device: torch.device
    on_host: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> DeviceStates:
        """As they are."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), on_device)

    def put_back(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.on_host)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


def seed_python(seed: int) -> None:
    """Seed Python's generator and, where it is loaded, NumPy's; `kept_generators` puts back what they held."""
    if _kept and _kept[-1] is None:
        _kept[-1] = GeneratorStates.now()
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed & 0xFFFF_FFFF)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """What the generators hold that code draws from without naming one, to be compared: torch's, Python's, NumPy's."""
    states = DeviceStates.now(device)
    on_device = None if states.on_device is None else states.on_device.numpy().tobytes()
    return states.on_host.numpy().tobytes(), on_device, GeneratorStates.now()


_kept: list[GeneratorStates | None] = []  # of each open block: Python's and NumPy's states, once they are seeded


@contextlib.contextmanager
def kept_generators(device: torch.device, *, draws: bool = False) -> Iterator[None]:
    """Leave the caller's generators as they were.

    Python's and NumPy's are kept when they are first seeded, or at once where code may draw from them before (`draws`).
    """
    states = DeviceStates.now(device)
    _kept.append(GeneratorStates.now() if draws else None)
    try:
        yield
    finally:
        if (drawn := _kept.pop()) is not None:
            drawn.put_back()
        states.put_back()
