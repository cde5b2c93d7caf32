"""What this machine has to share out: cores, memory, and which processor it is."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from assigner.machine.cgroup import core_limit, free_memory

_SHARE = re.compile(r"(?P<model>.*) \((?P<cores>\d+\.\d+) cores\)")


@dataclass(frozen=True)
class Machine:
    """This machine, as far as this process may use it.

    Args:
        cores: Cores, or the share of them that a control group leaves.
        memory_bytes: Memory that is free, or that a control group leaves.
        processor: The processor's model.
    """

    cores: float
    memory_bytes: float
    processor: str

    @classmethod
    def here(cls) -> Machine:
        """The machine that this process runs on."""
        cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        return cls(min(cores, core_limit() or cores), free_memory(), _processor())


def _processor() -> str:
    return _value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _value(file: str, name: str) -> str | None:
    """What stands behind a name in a list of the kernel's; None: it is not there, as on other systems."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def split_share(kind: str) -> tuple[str, float | None]:
    """A worker's kind, as `AMD EPYC (0.40 cores)`: the processor's model, and the cores of a quota; None: no quota."""
    match = _SHARE.fullmatch(kind)
    return (match["model"], float(match["cores"])) if match else (kind, None)
