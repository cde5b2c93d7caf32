"""Another script of this folder with all its messages, the tiny ones too, through shared memory where that is free.

    torchrun --nproc-per-node 3 tests/runs/through_memory.py SCRIPT ARGUMENTS

An arena is so small that some messages go through gloo after all.
"""

from __future__ import annotations

import mmap
import runpy
import sys

from assigner.runtime.messages import hostmemory

hostmemory.SHARED_FROM_BYTES = 1
hostmemory._ARENA_BYTES = 8 * mmap.PAGESIZE
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
