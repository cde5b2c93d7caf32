"""Memory that a process frees and takes anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = """
import contextlib
import os
import resource
import sys
import numpy as np
from assigner.runtime.recording.memory import settle_heap

def faults(peak_bytes, capacity_bytes):
    room = settle_heap(peak_bytes, capacity_bytes)
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with room or contextlib.nullcontext():
            held = [np.ones(1 << 17) for _ in range(100)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for room in sys.argv[1:]:
    if os.fork() == 0:
        print(faults(*map(float, room.split(","))), flush=True)
        os._exit(0)
    os.wait()
"""
"""For each room of PEAK,CAPACITY what a process takes anew, forked from one that has torch."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize(
    ("users", "rooms"),
    [
        ({}, {(0, 0): False, (150, 263): False, (150, 230): False, (150, 190): True, (150, 155): True}),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, {(0, 0): True}),
    ],
    ids=["as it is", "the user says how much"],
)
def test_freed_memory_is_kept_where_there_is_room_unless_the_user_says_otherwise(
    users: dict[str, str], rooms: dict[tuple[int, int], bool]
) -> None:
    """100 MiB that are freed and taken again: their 25,600 pages are the same ones, or the system's.

    They are kept where as much once more has room beside them, once it is known what an action takes.

    Args:
        users: Variables.
        rooms: A worker's peak and capacity in MiB, and whether the pages are the system's.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *(f"{peak << 20},{capacity << 20}" for peak, capacity in rooms)],
        env={**environment, **users}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    fresh = [int(faults) > 12_800 for faults in done.stdout.splitlines()]
    assert dict(zip(rooms, fresh, strict=True)) == rooms
