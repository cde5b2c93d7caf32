"""How much memory this process holds, read cheaply enough to do it after every action.

On a CPU: its anonymous resident pages, which are what allocations cost; pages of files and shared libraries are the
page cache's. Freed memory that the C library keeps for later counts as held, and so do the gaps in its heap. Older
Linux kernels let the number lag behind by some dozen pages a core or thread.
On CUDA: what the caching allocator has handed out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from assigner.machine.cgroup import free_memory
from assigner.machine.heap import return_free_pages

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = "/proc/self/statm"
_RESET_PEAK = "5"  # Documentation/filesystems/proc.rst, clear_refs


class MemoryGauge:
    """Reads what this process holds on a device, and the most that it has held since `reset_peak`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak_counts = False
        self._file = None
        if device.type == "cpu" and Path(_STATM).exists():
            self._file = os.open(_STATM, os.O_RDONLY)

    def held(self) -> int | None:
        """Bytes held now; None: the system does not say."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"])
        if self._file is None:
            return None
        _, resident, shared, *_ = os.pread(self._file, 256, 0).split()
        return (int(resident) - int(shared)) * _PAGE

    def reset_peak(self) -> None:
        """Forget the peak so far, where the system lets a process do that."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
            self._peak_counts = True
        except OSError:
            self._peak_counts = False

    def peak(self) -> int | None:
        """Bytes at the peak since `reset_peak`; None: the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self._peak_counts:
            return None
        status = Path("/proc/self/status").read_text()
        kib = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
        return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024  # the kernel's peak counts files' pages too

    def close(self) -> None:
        """Let go of the system's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def free_bytes(device: torch.device, *, sharing: int = 1) -> int:
    """Bytes that this process can still take on a device: its part of what nobody has, and what it keeps unused itself.

    Args:
        device: Where.
        sharing: Processes that share what nobody has.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] // sharing + idle
    return_free_pages()
    return free_memory() // sharing


def held_bytes(device: torch.device) -> int | None:
    """What this process holds on a device, once."""
    gauge = MemoryGauge(device)
    try:
        return gauge.held()
    finally:
        gauge.close()
