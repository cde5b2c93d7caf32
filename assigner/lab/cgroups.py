"""Control groups: a host's share of the processor and its memory limit, on cgroup v1 and v2 behind one interface.

A machine mounts each controller once: in a v1 hierarchy of its own (or shared with others), or in the one v2 hierarchy;
a "hybrid" machine has some of each. So each controller is looked for by itself, and a host's group is a folder in every
hierarchy that has one of the controllers it needs:

    v1   /sys/fs/cgroup/cpu/LAB/0        cpu.cfs_quota_us, cpu.cfs_period_us
         /sys/fs/cgroup/memory/LAB/0     memory.limit_in_bytes, memory.memsw.limit_in_bytes; memory.oom_control counts
    v2   /sys/fs/cgroup/LAB/0            cpu.max; memory.max, memory.swap.max; memory.events counts

In v2 a group has a controller only if its parent passes it on (`cgroup.subtree_control`), all the way from the
root, and a group that passes controllers on holds no processes itself, the root excepted ("no internal processes").
Source: the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.machine.kernel import counts, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PERIOD_US = 5_000
"""The quota's period: short, so that a slow host is slow evenly and not in fits of 100 ms (the kernel's default)."""
LEAST_QUOTA_US = 1_000
"""The kernel takes no smaller quota; a share under 0.2 of a core gets a longer period instead."""
WEIGHT = {1: ("cpu.shares", "102400"), 2: ("cpu.weight", "10000")}
"""A hundred times that of other groups: a host's share is its own, whatever else runs on the machine."""
_EMPTYING_S = 5.0  # how long a group may take to lose its killed processes
_SWAPPINESS = "memory.swappiness"
_HUGE_PAGE = 2 << 20  # a host that is refused one has less than that left


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy of cgroups 1 or 2, and what it controls; of v2, what its root can pass on."""

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


class HostGroup:
    """The groups of one host: made, limited, entered and removed together.

    They are within a group of the lab's name in each of the machine's hierarchies; `cpu` is cores, and None no limit.
    """

    def __init__(
        self, mounts: Mounts, lab: str, host: int, *, cpu: float | None = None, memory_bytes: int | None = None
    ) -> None:
        self._mounts, self._lab, self._host = mounts, lab, str(host)
        self._cpu, self._memory = cpu, memory_bytes

    @cached_property
    def _folders(self) -> dict[str, tuple[Mount, Path]]:
        """By controller: its hierarchy, and this host's folder in it."""
        wanted = {"cpu": self._cpu is not None, "memory": self._memory is not None}
        found = {}
        for controller in (name for name, limited in wanted.items() if limited):
            mount = self._mounts.mount(controller)
            if mount is None:
                raise UsageError(f"this machine has no cgroup controller {controller}", hint="assigner lab --check")
            found[controller] = mount, mount.folder / self._lab / self._host
        return found

    @property
    def entries(self) -> list[str]:
        """The files into which a process writes 0 to be in this host."""
        return sorted({str(folder / "cgroup.procs") for _, folder in self._folders.values()})

    def make(self) -> None:
        """Make the folders, and set the limits.

        Raises:
            UsageError: the kernel refuses; the message has its reason.
        """
        for controller, (mount, folder) in self._folders.items():
            try:
                if mount.version == 2:
                    _pass_on(controller, mount.folder)
                folder.parent.mkdir(exist_ok=True)
                if controller == "cpu":
                    name, value = WEIGHT[mount.version]
                    (folder.parent / name).write_text(value, encoding="utf-8")
                if mount.version == 2:
                    _pass_on(controller, folder.parent)
                folder.mkdir(exist_ok=True)
                for name, value in self._limits(controller, mount.version, folder):
                    (folder / name).write_text(value, encoding="utf-8")
            except OSError as error:
                raise UsageError(
                    f"control group {folder}: {error.strerror or error}",
                    hint=(mount.obstacle(controller) or ("", "assigner lab --check says what is missing"))[1],
                ) from error

    def _limits(self, controller: str, version: int, folder: Path) -> Iterator[tuple[str, str]]:
        """(file, value) of each limit, in the order in which the kernel takes them."""
        if controller == "cpu":
            assert self._cpu is not None, "it is a folder of this host because it has a share"
            quota, period = quota_us(self._cpu)
            if version == 2:
                yield "cpu.max", f"{quota} {period}"
            else:
                yield "cpu.cfs_period_us", str(period)
                yield "cpu.cfs_quota_us", str(quota)
            return
        limit, swap = ("memory.max", "memory.swap.max") if version == 2 else (
            "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        )  # fmt: skip
        if version == 1 and (folder / _SWAPPINESS).exists():  # the next is not there without swapaccount=1
            yield _SWAPPINESS, "0"
        yield limit, str(self._memory)
        if (folder / swap).exists():  # v1 counts memory and swap together, v2 swap alone
            yield swap, "0" if version == 2 else str(self._memory)

    def memory_kills(self) -> int:
        """How many processes of this host the kernel has killed for want of memory, its own or the machine's."""
        if "memory" not in self._folders:
            return 0
        mount, folder = self._folders["memory"]
        return counts(folder / ("memory.events" if mount.version == 2 else "memory.oom_control")).get("oom_kill", 0)

    def reached_limit(self) -> bool:
        """True if the host has been at its memory limit; if not, what was killed in it fell to the machine's own want.

        v2 counts the allocations that the limit refused. v1 does not always (`memory.failcnt` stays 0 in Linux 6.18 if
        swap is limited too), so there the most that was used tells.
        """
        if "memory" not in self._folders:
            return False
        mount, folder = self._folders["memory"]
        if mount.version == 2:
            return counts(folder / "memory.events").get("oom", 0) > 0
        assert self._memory is not None, "it is a folder of this host because it has a limit"
        peaks = [words(folder / f"memory.{kind}max_usage_in_bytes") for kind in ("", "memsw.")]
        return max((int(peak[0]) for peak in peaks if peak), default=0) >= self._memory - _HUGE_PAGE


def _pass_on(controller: str, group: Path) -> None:
    """Let the groups within one have a controller (v2)."""
    control = group / "cgroup.subtree_control"
    if controller not in words(control):
        control.write_text(f"+{controller}", encoding="utf-8")


def quota_us(cores: float) -> tuple[int, int]:
    """Quota and period in µs, which the kernel takes, for a share of the processor."""
    period = max(PERIOD_US, ceil(LEAST_QUOTA_US / cores))
    return max(LEAST_QUOTA_US, round(cores * period)), period


def group_members(mounts: Mounts, lab: str) -> set[int]:
    """The processes in a lab's groups, and in those that were made within them."""
    return {int(process) for group in _groups(mounts, lab) for process in words(group / "cgroup.procs")}


def remove_groups(mounts: Mounts, lab: str) -> None:
    """Remove a lab's groups, all that can be, once their processes have ended.

    Raises:
        UsageError: a process in them does not end.
    """
    deadline = time.monotonic() + _EMPTYING_S
    failed = []
    for group in _groups(mounts, lab):
        try:
            _remove(group, deadline)
        except UsageError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _groups(mounts: Mounts, lab: str) -> list[Path]:
    """A lab's folders in all hierarchies, each before the one around it."""
    return [Path(folder) for mount in mounts.all for folder, _, _ in os.walk(mount.folder / lab, topdown=False)]


def _remove(group: Path, deadline: float) -> None:
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise UsageError(
                    f"control group {group} cannot be removed: {error.strerror or error}",
                    hint=f"its processes: cat {group}/cgroup.procs",
                ) from error
            time.sleep(0.02)
        else:
            return


def labs_with_groups(mounts: Mounts, prefix: str) -> set[str]:
    """The names of labs that have groups here, their own or left behind."""
    found: set[str] = set()
    for mount in mounts.all:
        with suppress(OSError):
            found.update(each.name for each in mount.folder.glob(f"{prefix}*") if each.is_dir())
    return found
