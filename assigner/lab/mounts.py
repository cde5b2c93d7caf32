"""Where this machine's control groups are: the mounted hierarchies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.machine.kernel import words

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy.

    Args:
        folder: Where it is mounted.
        version: 1 or 2.
        controllers: What it controls; of v2, what its root can pass on.
    """

    folder: Path
    version: int
    controllers: frozenset[str]

    def obstacle(self, controller: str) -> tuple[str, str] | None:
        """Why no group with this controller can be made here, and the way out; None: it can."""
        if not os.access(self.folder, os.W_OK):
            return f"{self.folder} cannot be written", "in a container: docker run --privileged"
        if self.version == 1 or controller in words(self.folder / "cgroup.subtree_control"):
            return None
        inside = (self.folder / "cgroup.type").exists()  # the real root has no such file
        if inside and words(self.folder / "cgroup.procs"):
            leaf = self.folder / "init"
            return (
                f"{self.folder} holds processes, so that it cannot pass {controller} on to groups within it",
                f"mkdir {leaf}; for p in $(cat {self.folder}/cgroup.procs); do echo $p > {leaf}/cgroup.procs; done",
            )
        return None


class Mounts:
    """The hierarchies that this process sees, v1 first: a controller that is bound there is not to be had in v2."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self.all = tuple(sorted(mounts, key=lambda mount: mount.version))

    @classmethod
    def here(cls, proc: Path = Path("/proc/self")) -> Mounts:
        """What `mountinfo` and `cgroup` of a process say; nothing on other systems than Linux."""
        if not (proc / "mountinfo").is_file():
            return cls([])
        known = _controllers(proc / "cgroup")
        found: dict[Path, Mount] = {}
        for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            where = Path(left.split(" ")[4].replace("\\040", " "))
            if kind == "cgroup":
                found.setdefault(where, Mount(where, 1, known.intersection(options.split(","))))
            elif kind == "cgroup2":
                found.setdefault(where, Mount(where, 2, frozenset(words(where / "cgroup.controllers"))))
        return cls(found.values())

    def mount(self, controller: str) -> Mount | None:
        """The hierarchy that has a controller; None: this machine, or this container, has it nowhere."""
        return next((mount for mount in self.all if controller in mount.controllers), None)


def _controllers(path: Path) -> frozenset[str]:
    """Those of all lines `4:cpu,cpuacct:/group`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines for name in line.split(":", 2)[1].split(","))
