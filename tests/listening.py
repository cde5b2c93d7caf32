"""Where this machine's processes listen."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def listening(port: int | None = None) -> list[str]:
    """The addresses at which somebody listens on a port; None: this process on any. `::` and `0.0.0.0` are all."""
    mine, found = set(), []
    for link in Path("/proc/self/fd").iterdir() if not port else ():
        with suppress(FileNotFoundError):  # closed by another thread
            mine.add(link.readlink().name)
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] == _LISTENING and (int(number, 16) == port or f"socket:[{words[9]}]" in mine):
                parts = [struct.pack("=I", int(address[n : n + 8], 16)) for n in range(0, len(address), 8)]
                found.append(socket.inet_ntop(family, b"".join(parts)))
    return found
