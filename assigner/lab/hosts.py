"""The hosts while they exist: namespaces and control groups that carry one name, made together, removed together.

The name holds the mark of the lab's process, so that any later lab can tell what a killed one left behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.lab.cgroups import HostGroup, Mounts, group_members, labs_with_groups, remove_groups
from assigner.lab.network import (
    NAMESPACES,
    address,
    build_network,
    labs_with_namespaces,
    namespace,
    network_members,
    remove_network,
)
from assigner.launch.launcherwatch import is_left_behind, own_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.lab.cluster import Cluster
    from assigner.lab.running import Interruption

PREFIX = "assigner-lab-"
TABLES = Path("/run")
_TABLE = ".hosts"
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20
_KILLING_S = 5.0
_TURN_S = 0.02


def lab_name() -> str:
    """The name of this process's lab."""
    return f"{PREFIX}{own_mark()}"


def _table(lab: str) -> Path:
    """The file that stands in for /etc/hosts on the lab's hosts."""
    return TABLES / f"{lab}{_TABLE}"


def _labs_with_tables() -> set[str]:
    """The names of labs that have such a file, their own or left behind."""
    return {each.name.removesuffix(_TABLE) for each in TABLES.glob(f"{PREFIX}*{_TABLE}")}


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    """Tell what the system has against a file as an error of the user's machine."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}", hint="the lab keeps its table of hosts there") from error


def remove_lab(mounts: Mounts, lab: str) -> None:
    """Kill what runs in a lab and remove what it is made of, all that can be.

    Raises:
        UsageError: the kernel refuses.
    """
    with ExitStack() as rest:  # from the last to the first, whatever becomes of the others
        rest.callback(remove_network, lab)
        rest.callback(remove_groups, mounts, lab)
        _kill_members(mounts, lab)
        with _refusals(_table(lab)):
            _table(lab).unlink(missing_ok=True)


def _kill_members(mounts: Mounts, lab: str) -> None:
    """Kill until nobody is left: what was killed may have had children after it was asked for."""
    until = time.monotonic() + _KILLING_S
    while (members := (network_members(lab) | group_members(mounts, lab)) - {0, os.getpid()}) and (
        time.monotonic() < until
    ):
        for process in members:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(process, signal.SIGKILL)
        time.sleep(_TURN_S)


def remove_left_behind(mounts: Mounts, *, warn: Callable[[str], object]) -> list[str]:
    """Remove every lab whose process is gone, and return their names.

    `warn` gets a sentence for each lab of which something stays.
    """
    labs = labs_with_namespaces(PREFIX) | labs_with_groups(mounts, PREFIX) | _labs_with_tables()
    removed = []
    for lab in sorted(lab for lab in labs if is_left_behind(lab.removeprefix(PREFIX))):
        try:
            remove_lab(mounts, lab)
        except UsageError as error:
            warn(f"warning: something stays of {lab}, which was killed: {error.message}\n")
        else:
            removed.append(lab)
    return removed


class Hosts:
    """The hosts of one cluster, by number, with the control groups of each."""

    def __init__(self, cluster: Cluster, mounts: Mounts) -> None:
        self.name, self._cluster = lab_name(), cluster
        self.groups = [
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
        with _refusals(_table(self.name)):
            _table(self.name).write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
        build_network(self._cluster, self.name)
        for group in self.groups:
            group.make()

    def entrance(self, host: int) -> Callable[[], None]:
        """What a new process calls to be on a host, before it becomes its program.

        It leaves this terminal's process group, so that Ctrl-C reaches the lab alone; is told to end (SIGTERM) when the
        lab is killed; and has a host name and an /etc/hosts of its own, in which the cluster's hosts stand.
        """
        entries = self.groups[host].entries
        wire = str(NAMESPACES / namespace(self.name, host))
        table, name = str(_table(self.name)).encode(), self._cluster.host[host].name.encode()
        libc, lab = ctypes.CDLL(None, use_errno=True), os.getpid()

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
            if os.getppid() != lab:  # it was killed before this process could hear of it
                os._exit(1)

        return enter


@contextmanager
def existing(cluster: Cluster, interruption: Interruption, *, warn: Callable[[str], object]) -> Iterator[Hosts]:
    """The hosts of a cluster for as long as the block runs; removed whatever ends it, the interruption held meanwhile.

    Raises:
        UsageError: they cannot be made here.
    """
    mounts = Mounts.here()
    remove_left_behind(mounts, warn=warn)
    hosts = Hosts(cluster, mounts)
    try:
        try:
            hosts.build()
            yield hosts
        finally:
            interruption.hold()
    finally:
        remove_lab(mounts, hosts.name)
