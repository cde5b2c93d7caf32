"""How much memory this process holds, read cheaply enough to do it after every action.

On a CPU: its anonymous resident pages, which are what allocations cost; pages of files and shared libraries are the
page cache's. Freed memory that the C library keeps for later counts as held, and so do the gaps in its heap. Older
Linux kernels let the number lag behind by some dozen pages a core or thread.
On CUDA: what the caching allocator has handed out.
"""

from __future__ import annotations

import os
import re
import weakref
from pathlib import Path

import torch

from assigner.machine.cgroup import free_memory
from assigner.machine.heap import is_settled, keep_freed_memory, return_free_pages

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = "/proc/self/statm"
_HOLES = 0.75  # of a predicted peak: the most seen is 0.57, of a GPT that rematerialises its whole batch at once
_FADING = 0.99  # of what an action once took, with every action since
_RESET_PEAK = "5"  # Documentation/filesystems/proc.rst, clear_refs


class MemoryGauge:
    """Reads what this process holds on a device, and the most that it has held since `reset_peak`."""

    _earlier = 0  # bytes, of CPUs: the most until the kernel last forgot it, for all gauges of the process

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak_counts = False
        self._file = None
        if device.type == "cpu" and Path(_STATM).exists():
            self._file = os.open(_STATM, os.O_RDONLY)
            self._closing = weakref.finalize(self, os.close, self._file)

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
        MemoryGauge._earlier = 0
        self._forget()

    def peak(self) -> int | None:
        """Bytes at the peak since `reset_peak`; None: the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        now = self.part_peak()
        return None if now is None else max(now, self._earlier)

    def begin_part(self) -> None:
        """On a CPU: have `part_peak` count from now on; `peak` goes on."""
        MemoryGauge._earlier = max(self._earlier, self.part_peak() or 0)
        self._forget()

    def part_peak(self) -> int | None:
        """On a CPU: bytes at the peak since the last `begin_part` or `reset_peak`; None: the system does not say."""
        if not self._peak_counts:
            return None
        status = Path("/proc/self/status").read_text()
        kib = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
        return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024  # the kernel's peak counts files' pages too

    def _forget(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
            self._peak_counts = True
        except OSError:
            self._peak_counts = False

    def close(self) -> None:
        """Let go of the system's file."""
        if self._file is not None:
            self._closing()
            self._file = None


class HeapRoom:
    """How much of what is freed a heap may keep on a CPU worker with little memory; then it gives all back, once.

    Giving back all at once, as the C library does by itself, takes up to two fifths of a backward's time, which no
    profile has.
    """

    def __init__(self, peak_bytes: float, capacity_bytes: float, *, sharing: int = 1) -> None:
        """`peak_bytes`: what the worker is predicted to hold of its capacity; `sharing`: ranks of its host."""
        self._gauge = MemoryGauge(torch.device("cpu"))
        free = free_bytes(self._gauge.device, sharing=sharing)
        self._before = self._gauge.held() or 0
        self._most = self._before + min(capacity_bytes, free)
        self._spare = max(0.0, capacity_bytes - peak_bytes) / 2
        self._taken = peak_bytes  # by an action, at the most; until that is known

    def __enter__(self) -> None:
        """An action comes next: it may take as much as one did lately, and half of what the prediction has to spare.

        What the first ones take nobody has seen: theirs is all that is predicted.
        """
        held = self._gauge.held() or 0
        if held + max(self._taken, self._spare) > self._most:
            return_free_pages()
            held = self._gauge.held() or 0
        self._before = held
        self._gauge.begin_part()

    def __exit__(self, *_: object) -> None:
        """It has ended: the next one may take as much, be it that it gave that back at once."""
        if (most := self._gauge.part_peak()) is not None:
            self._taken = max(most - self._before, _FADING * self._taken)


def settle_heap(peak_bytes: float, capacity_bytes: float, *, sharing: int = 1) -> HeapRoom | None:
    """Have a CPU worker's heap keep what is freed, as far as there is room; arguments as of `HeapRoom`.

    Returns:
        What gives it back between actions; None: there is room for all of it, or the user says how much.
    """
    keep_freed_memory()
    if (1 + _HOLES) * peak_bytes <= capacity_bytes or is_settled():
        return None
    return HeapRoom(peak_bytes, capacity_bytes, sharing=sharing)


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
