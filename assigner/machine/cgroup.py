"""What control groups leave to this process: cores and memory, in the v1 and the v2 layout."""

from __future__ import annotations

import itertools
import os
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from assigner.machine.kernel import ancestors, counts, entry, host_mark, usable_cores, words

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN = Path("/proc/self/cgroup")
_GROUPS = Path("/proc/self/ns/cgroup")
_TREE = "sys/fs/cgroup"
_UNLIMITED = 1 << 60  # v1 writes a number of this size where there is no limit


def core_limit() -> float | None:
    """Cores that the tightest quota allows; None: there is no quota."""
    limits = []
    for folder in _folders("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            limits.append(quota / period)
        told = words(folder / "cpu.max")
        if len(told) == 2 and told[0] != "max":
            limits.append(int(told[0]) / int(told[1]))
    return min(limits, default=None)


def allowed_cores() -> float:
    """Cores that affinity and quota leave to this process."""
    cores, limit = float(usable_cores()), core_limit()
    return cores if limit is None else min(cores, limit)


def throttled_s() -> float:
    """Seconds for which this process's groups have been stopped by their quotas, on all cores together, until now."""
    total = 0.0
    for folder in _folders("cpu"):
        told = counts(folder / "cpu.stat")
        total += told.get("throttled_usec", 0) / 1e6 + told.get("throttled_time", 0) / 1e9
    return total


def memory_limit() -> int | None:
    """Bytes that the tightest limit allows; None: there is none."""
    limits = [limit for folder in _folders("memory") if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def memory_pool() -> int | None:
    """The same for processes that take memory from one limit, or from their host; None: the system does not say.

    Those of two containers, or of two groups, count as apart: which limit they meet first is not known.
    """
    try:
        return zlib.crc32(f"{host_mark()} {_GROUPS.readlink()} {_OWN.read_text()}".encode())
    except OSError:
        return None


def free_memory() -> int:
    """Bytes that this host can still give to this process: its free memory, or what a limit leaves of it."""
    free = _available()
    for folder in _folders("memory"):
        limit = _limit(folder)
        if limit is not None:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            free = min(free, limit - max(0, used - _cached(folder)))
    return max(0, free)


def _available() -> int:
    told = entry(Path("/proc/meminfo"), "MemAvailable:")  # in kB
    if told is None:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(told.split()[0]) * 1024


def _limit(folder: Path) -> int | None:
    """A group's memory limit, in bytes."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            return limit
    return None


def _cached(folder: Path) -> int:
    """Page cache that a group counts as used and gives up when memory is asked for.

    Shared memory (tmpfs) is counted as page cache too, and has no file to go back to.
    """
    told = counts(folder / "memory.stat")
    return told.get("total_cache", told.get("file", 0)) - told.get("total_shmem", told.get("shmem", 0))


def _folders(controller: str) -> list[Path]:
    """This process's groups of a controller, innermost first."""
    tree = _tree()
    if tree is None:
        return []
    found = []
    for line in _OWN.read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        root = tree / controller if names else _unified(tree)
        if (controller in names.split(",") or names == "") and root.is_dir():
            found += _outwards(root, PurePosixPath(path).parts[1:])
    return found


def _unified(tree: Path) -> Path:
    """The v2 hierarchy: the tree itself, or a folder in it beside those of v1 ("hybrid")."""
    beside = tree / "unified"
    return beside if (beside / "cgroup.controllers").exists() else tree


def _outwards(root: Path, parts: Sequence[str]) -> list[Path]:
    """A group's folder and those around it; a container shows the part of the tree in which it is, and no more."""
    while parts and not root.joinpath(*parts).is_dir():
        parts = parts[1:]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _tree() -> Path | None:
    """Where the file systems of control groups are mounted; None: nowhere.

    A network namespace made by `ip netns` has a /sys of its own without them; the process that made it, further up,
    still sees them.
    """
    for process in itertools.chain(["self"], ancestors()):
        tree = Path("/proc", str(process), "root", _TREE)
        try:
            if any(tree.iterdir()):
                return tree
        except OSError:
            return None
    return None


def _number(path: Path) -> int | None:
    told = words(path)
    return int(told[0]) if told and told[0].lstrip("-").isdigit() else None
