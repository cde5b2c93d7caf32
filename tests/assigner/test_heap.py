"""Memory that a process frees and takes anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource
import sys
import numpy as np
from assigner.machine.heap import keep_freed_memory
from assigner.runtime.recording.memory import heap_room

keep_freed_memory()
room = heap_room(*map(float, sys.argv[1:])) if sys.argv[1:] else None
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [np.ones(1 << 17) for _ in range(100)]
    del held
    if room is not None:
        room.make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize(
    ("users", "room", "fresh"),
    [
        ({}, (), False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, (), True),
        ({}, (150 << 20, 263 << 20), False),
        ({}, (150 << 20, 230 << 20), False),
        ({}, (150 << 20, 190 << 20), True),
    ],
)
def test_freed_memory_is_kept_where_there_is_room_unless_the_user_says_otherwise(
    users: dict[str, str], room: tuple[int, ...], fresh: bool
) -> None:
    """100 MiB that are freed and taken again: their 25,600 pages are the same ones, or the system's.

    They are kept where as much once more has room beside them.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *map(str, room)],
        env={**environment, **users}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(done.stdout) > 12_800) is fresh
