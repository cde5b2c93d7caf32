"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

_RANGE = range(10_000, 30_000)
_draws = random.SystemRandom()  # tests seed the common one, alike in all of pytest's processes


def free_ports(count: int) -> list[int]:
    """Free ones below those that systems hand out: no other process's connection takes them meanwhile."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            probe, number = held.enter_context(socket.socket()), _draws.choice(_RANGE)
            with suppress(OSError):
                probe.bind(("127.0.0.1", number))
                found.append(number)
        return found
