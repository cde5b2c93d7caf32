"""What the kernel says of this machine and of processes; on systems without /proc, what Python knows."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def usable_cores() -> int:
    """Cores on which this process may run, whatever a quota leaves of their time."""
    return len(core_numbers())


def core_numbers() -> tuple[int, ...]:
    """Which they are."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def processor_model() -> str:
    """The processor's name, `AMD EPYC 7B13`."""
    return entry(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine() or "CPU"


def host_mark() -> str:
    """The same for all processes of a host, of one of its containers, or of a host of the lab.

    Raises:
        OSError: the kernel does not say.
    """
    return f"{_BOOT_ID.read_text().strip()} {_NETWORK.readlink()}"


def entry(path: Path, name: str) -> str | None:
    """What stands behind a name in a list of the kernel's; None: it is not there."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def words(path: Path) -> list[str]:
    """The words of a small file; none where it cannot be read, as of a control group without the controller."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def counts(path: Path) -> dict[str, int]:
    """A list of the kernel's of a name and a number a line: `oom_kill 3`; empty where it cannot be read."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def process_facts(process: int | str) -> list[str]:
    """Of a process its state, its parent and what else /proc/PID/stat says; empty: there is none, or no such file."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def ancestors() -> Iterator[int]:
    """The processes above this one, the nearest first, as far as the kernel tells of them."""
    process = os.getppid()
    while process > 0:
        yield process
        facts = process_facts(process)
        process = int(facts[1]) if facts else 0
