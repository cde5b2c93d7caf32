"""Memory that a process frees, and takes anew a moment later.

glibc gives large blocks, and a long free end of the heap, back to the system; the next forward takes them anew, and the
system fills every page with zeros first. A training step does so with all of its activations and gradients: that takes
up to a fifth of its processor time, and more or less from run to run, as the heap happens to lie. A worker keeps them
for its next step, and holds its peak all the time.

What lives on among what is freed, as gradients among activations, leaves holes that what comes next does not fit into.
Where there is no room for these, they are given back while it trains (`assigner.runtime.recording.memory`).
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what `mallopt` calls them
_KEPT = (1 << 31) - 1  # bytes: the most that it can be told
_LARGEST_KEPT = 1 << 25  # of one block; likewise
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_LIBRARY = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Have this process's heap keep what is freed: up to 2 GiB at its end, in blocks of up to 32 MiB.

    What the environment says of malloc counts (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES). C libraries other
    than glibc are left as they are.
    """
    settle = getattr(_LIBRARY, "mallopt", None)
    if settle is not None and not is_settled():
        settle(_MMAP_THRESHOLD, _LARGEST_KEPT)
        settle(_TRIM_THRESHOLD, _KEPT)


def is_settled() -> bool:
    """Whether the environment says what is kept."""
    return any(name in os.environ for name in _OF_USERS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def return_free_pages() -> None:
    """Have glibc give back what the heap keeps, its holes too, once; other C libraries do so by themselves."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
