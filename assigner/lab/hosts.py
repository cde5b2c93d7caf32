"""The hosts while they exist: namespaces and control groups that carry one name, made together, removed together.

The name holds the process id of the lab and when that process began, so that any later lab can tell what a killed one
left behind: its id belongs to no process, or to one that began at another time.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.lab.cgroups import HostGroup, group_members, labs_with_groups, remove_groups
from assigner.lab.mounts import Mounts
from assigner.lab.network import (
    NAMESPACES,
    Network,
    address,
    labs_with_namespaces,
    network_members,
    remove_network,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.lab.cluster import Cluster
    from assigner.lab.interruption import Interruption

PREFIX = "assigner-lab-"
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20


def lab_name() -> str:
    """The name of this process's lab."""
    return f"{PREFIX}{os.getpid()}-{_began(os.getpid())}"


def _began(process: int) -> str:
    """When a process began, in clock ticks since the machine's start; empty: there is none."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _is_left_behind(lab: str) -> bool:
    process, _, began = lab.removeprefix(PREFIX).partition("-")
    return process.isdigit() and bool(began) and _began(int(process)) != began


def _table(lab: str) -> Path:
    """The file that stands in for /etc/hosts on the lab's hosts."""
    return Path("/run", f"{lab}.hosts")


def remove_lab(mounts: Mounts, lab: str) -> None:
    """Kill what runs in a lab and remove what it is made of.

    Raises:
        UsageError: the kernel refuses.
    """
    for process in (network_members(lab) | group_members(mounts, lab)) - {0, os.getpid()}:
        with suppress(ProcessLookupError):  # it ended by itself
            os.kill(process, signal.SIGKILL)
    _table(lab).unlink(missing_ok=True)
    try:
        remove_groups(mounts, lab)
    finally:
        remove_network(lab)


def remove_left_behind(mounts: Mounts) -> list[str]:
    """Remove every lab whose process is gone, and return their names."""
    labs = sorted(filter(_is_left_behind, labs_with_namespaces(PREFIX) | labs_with_groups(mounts, PREFIX)))
    for lab in labs:
        remove_lab(mounts, lab)
    return labs


class Hosts:
    """The hosts of one cluster, by number.

    Args:
        cluster: The cluster.
        mounts: Where control groups are.
    """

    def __init__(self, cluster: Cluster, mounts: Mounts) -> None:
        self.name, self._cluster, self._mounts = lab_name(), cluster, mounts
        self._network = Network(cluster, self.name)
        self._groups = [
            HostGroup(
                mounts, self.name, n, cpu=host.cpu,
                memory_bytes=None if host.memory_mib is None else int(host.memory_mib * _MIB),
            )
            for n, host in enumerate(cluster.host)
        ]  # fmt: skip

    def build(self) -> None:
        """Make all of it.

        Raises:
            UsageError: the kernel or a tool refuses.
        """
        names = [(address(n), host.name) for n, host in enumerate(self._cluster.host)]
        lines = [f"{where} {name}\n::ffff:{where} {name}.lab" for where, name in names]  # sockets that speak IPv6 too
        _table(self.name).write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
        self._network.build()
        for group in self._groups:
            group.make()

    def remove(self) -> None:
        """Kill what runs on the hosts and remove them; what is not there is no error."""
        remove_lab(self._mounts, self.name)

    def memory_kills(self, host: int) -> int:
        """How many processes the kernel has killed for the host's memory limit."""
        return self._groups[host].memory_kills()

    def entrance(self, host: int) -> Callable[[], None]:
        """What a new process calls to be on a host, before it becomes its program.

        It leaves this terminal's process group, so that Ctrl-C reaches the lab alone; is told to end (SIGTERM) when the
        lab is killed; and has a host name and an /etc/hosts of its own, in which the cluster's hosts stand.
        """
        entries = self._groups[host].entries
        wire = str(NAMESPACES / self._network.namespace(host))
        table, name = str(_table(self.name)).encode(), self._cluster.host[host].name.encode()
        libc = ctypes.CDLL(None, use_errno=True)

        def did(result: int) -> None:
            if result:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        def enter() -> None:
            os.setsid()
            for entry in entries:
                Path(entry).write_text("0")
            descriptor = os.open(wire, os.O_RDONLY)
            did(libc.setns(descriptor, _CLONE_NEWNET))
            os.close(descriptor)
            did(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
            did(libc.mount(None, b"/", None, _MS_PRIVATE | _MS_REC, None))  # what is mounted here stays here
            if Path("/etc/hosts").exists():
                did(libc.mount(table, b"/etc/hosts", None, _MS_BIND, None))
            did(libc.sethostname(name, len(name)))
            did(libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)))

        return enter


@contextmanager
def existing(cluster: Cluster, interruption: Interruption) -> Iterator[Hosts]:
    """The hosts of a cluster for as long as the block runs; removed whatever ends it.

    Raises:
        UsageError: they cannot be made here.
    """
    mounts = Mounts.here()
    remove_left_behind(mounts)
    hosts = Hosts(cluster, mounts)
    try:
        try:
            hosts.build()
            yield hosts
        finally:
            interruption.hold()
    finally:
        hosts.remove()
