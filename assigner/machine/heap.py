"""Memory that a process frees, and takes anew a moment later.

glibc gives large blocks, and a long free end of the heap, back to the system; the next forward takes them anew, and the
system fills every page with zeros first. A training step does so with all of its activations and gradients: that takes
up to a fifth of its processor time, and more or less from run to run, as the heap happens to lie. A worker keeps them
for its next step, and holds its peak all the time.

What lives on among what is freed, as gradients among activations, leaves holes that what comes next does not fit into.
Blocks with pages of their own leave none. So a worker that has no room for holes gives everything back at once.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what `mallopt` calls them
_KEPT = (1 << 31) - 1  # bytes: the most that it can be told
_LARGEST_KEPT = 1 << 25  # of one block; likewise
_LEAST_OWN = 1 << 17  # bytes of a block that has pages of its own where nothing is kept, and of what is kept at the end
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_HOLES = 0.75  # of a predicted peak: the most seen is 0.57, of a GPT that rematerialises its whole batch at once


def keep_freed_memory(peak_bytes: float = 0.0, capacity_bytes: float = 0.0) -> None:
    """Have this process's heap keep what is freed: up to 2 GiB at its end, in blocks of up to 32 MiB.

    What the environment says of malloc counts (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES). C libraries other
    than glibc are left as they are.

    Args:
        peak_bytes: What this worker is predicted to hold.
        capacity_bytes: What it has. Where holes may not fit in, too, nothing is kept.
    """
    settle = getattr(ctypes.CDLL(None), "mallopt", None)
    is_settled = any(name in os.environ for name in _OF_USERS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if settle is not None and not is_settled:
        has_room = (1 + _HOLES) * peak_bytes <= capacity_bytes
        settle(_MMAP_THRESHOLD, _LARGEST_KEPT if has_room else _LEAST_OWN)
        settle(_TRIM_THRESHOLD, _KEPT if has_room else _LEAST_OWN)


def return_free_pages() -> None:
    """Have glibc give back what the heap keeps, once; other C libraries do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
