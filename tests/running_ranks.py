"""Ranks of a run that is going on, found among this machine's processes."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_rank(launcher: int, rank: int) -> int:
    """The process id of a rank under a launcher, once it trains."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                environment = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue  # a process that ended while it was looked at
            if parent == launcher and f"RANK={rank}".encode() in environment:
                return int(entry.name)
        time.sleep(0.1)
    raise AssertionError("the rank never started")
