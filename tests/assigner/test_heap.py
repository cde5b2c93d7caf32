"""Memory that a process frees and takes anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = """
import contextlib
import resource
import sys
import numpy as np
from assigner.runtime.recording.memory import settle_heap

room = settle_heap(*map(float, sys.argv[1:] or (0, 0)))
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with room or contextlib.nullcontext():
        held = [np.ones(1 << 17) for _ in range(100)]
    del held
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
        ({}, (150 << 20, 155 << 20), True),
    ],
)
def test_freed_memory_is_kept_where_there_is_room_unless_the_user_says_otherwise(
    users: dict[str, str], room: tuple[int, ...], fresh: bool
) -> None:
    """100 MiB that are freed and taken again: their 25,600 pages are the same ones, or the system's.

    They are kept where as much once more has room beside them, once it is known what an action takes.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *map(str, room)],
        env={**environment, **users}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(done.stdout) > 12_800) is fresh
