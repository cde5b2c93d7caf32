"""Where this machine's control groups are: the mounted hierarchies, and this process's own place in them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy.

    Args:
        folder: Where it is mounted.
        version: 1 or 2.
        controllers: What it controls; of v2, what its root can pass on.
        own: The group of this process in it.
    """

    folder: Path
    version: int
    controllers: frozenset[str]
    own: Path

    @property
    def chain(self) -> Iterator[Path]:
        """This process's groups from its own outwards."""
        group = self.own
        while group != self.folder and group.is_relative_to(self.folder):
            yield group
            group = group.parent
        yield self.folder

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
        own = dict(_own_groups(proc / "cgroup"))
        found: dict[Path, Mount] = {}
        for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            _, _, _, root, folder, *_ = left.split(" ")
            where = Path(folder.replace("\\040", " "))
            if kind == "cgroup":
                controllers = frozenset(options.split(",")) & own.keys()
                path = next((own[name] for name in controllers), "/")
                found.setdefault(where, Mount(where, 1, controllers, _below(where, root, path)))
            elif kind == "cgroup2":
                controllers = frozenset(words(where / "cgroup.controllers"))
                found.setdefault(where, Mount(where, 2, controllers, _below(where, root, own.get("", "/"))))
        return cls(found.values())

    def mount(self, controller: str) -> Mount | None:
        """The hierarchy that has a controller; None: this machine, or this container, has it nowhere."""
        return next((mount for mount in self.all if controller in mount.controllers), None)


def _own_groups(path: Path) -> Iterator[tuple[str, str]]:
    """(controller, group) of each line `4:cpu,cpuacct:/group`; v2 has no controller there."""
    for line in path.read_text(encoding="utf-8").splitlines():
        _, names, group = line.split(":", 2)
        yield from ((name, group) for name in names.split(","))


def _below(folder: Path, root: str, group: str) -> Path:
    """Where a group is, in a mount that shows the hierarchy from `root` on."""
    path, top = Path(group), Path(root)
    return folder / path.relative_to(top) if path.is_relative_to(top) else folder


def words(path: Path) -> list[str]:
    """The words of a small file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
