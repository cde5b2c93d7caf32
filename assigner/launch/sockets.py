"""The connections that a run opens in this process: told to notice a wire that is cut.

A host that is unplugged, or whose switch has died, closes nothing: its peers' connections stay open, and a wait on them
lasts as long as its time-out. But a kernel can ask the other kernel, which answers for a process that computes, holds
the interpreter's lock, gets little of its processor or is stopped; a thin wire's full queue only delays its answers.

    nothing to send      the kernel asks after 2 s of silence, then every second (keepalive)
    data on its way      it sends them again, after longer and longer pauses
    5 s without answer   the connection is shut down, and whoever waits on it learns of it

A thread of the user's may open connections of its own at any time. What a run opens is told from them by its ends: the
store's connections have the store's port, and the process group's have another rank at the other end (the ranks tell
each other the ends that they have).

Works on Linux; elsewhere a cut wire is noticed by the time-out of a wait alone.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SILENCE_S = 5.0
_FILES = Path("/proc/self/fd")
_ASKING = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 10}
_LOOK_S = 0.25
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("=8B13I")  # the head of Linux's `struct tcp_info`, up to tcpi_last_ack_recv
_UNANSWERED = 2  # so many questions or repetitions in a row are no chance


@dataclass(frozen=True)
class ConnectionEnds:
    """Address and port of a connection's two ends, as the process at one of them has it."""

    here: str
    here_port: int
    there: str
    there_port: int

    @property
    def mirrored(self) -> ConnectionEnds:
        """As the process at the other end has it."""
        return ConnectionEnds(self.there, self.there_port, self.here, self.here_port)


class Connections:
    """The TCP connections that a run opens in this process from now on; all others are left alone.

    A thread looks after them until `close`.

    Args:
        port: The port of the run's store, whose connections are the run's; None: all that are opened are (this process
            runs no code but this package's).

    Attributes:
        silent: Addresses of the hosts that did not answer, and whose connections were shut down.
        run_failed: The run's watch knows of a failure: no wait for another rank has to go on.
    """

    def __init__(self, port: int | None = None) -> None:
        self.silent: set[str] = set()
        self.run_failed = False
        self._port = port
        self._before = {inode for inode, _ in _tcp_sockets()}
        self._guarded: set[int] = set()
        self._ending: dict[int, int] = {}  # those to other ranks, and to which
        self._hosts: set[str] = set()
        self._settled, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="assigner-connections", daemon=True)
        self._thread.start()

    def guard(self) -> None:
        """Look after those as well that were opened to the store since the last call."""
        self._adopt({})

    def ends(self) -> list[ConnectionEnds]:
        """Those of every connection opened so far: what `settle` wants of each rank."""
        opened = ((inode, _ends(each)) for inode, each in _tcp_sockets() if inode not in self._before)
        return [ends for _, ends in opened if ends is not None]

    def settle(self, theirs: Mapping[int, Iterable[ConnectionEnds]] = MappingProxyType({})) -> None:
        """Look after the connections to the other ranks, and let `hang_up` end them.

        It is called again where a process group has opened more; beside that only `guard` adds to them later.
        """
        self._settled.set()
        self._adopt({each.mirrored: rank for rank, ends in theirs.items() for each in ends})

    def _adopt(self, ranks: Mapping[ConnectionEnds, int]) -> None:
        """Look after new connections to the store, and after those with these ends, which lead to ranks."""
        for inode, each in _tcp_sockets():
            if inode in self._before or inode in self._guarded:
                continue
            ends = _ends(each)
            rank = None if ends is None else ranks.get(ends)
            is_stores = self._port is None or (ends is not None and self._port in (ends.here_port, ends.there_port))
            if not is_stores and rank is None:
                continue
            with suppress(OSError):  # a kernel without an option: then nobody asks on it
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _ASKING.items():
                    each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._guarded.add(inode)
            if rank is not None and not is_stores:
                self._ending[inode] = rank

    def hang_up(self) -> None:
        """Shut down those to the other ranks, whoever still holds them: the other ends learn of it."""
        for inode, each in _tcp_sockets():
            if inode in self._ending:
                with suppress(OSError):  # it is closed, or only listens
                    each.getpeername()
                    each.shutdown(socket.SHUT_RDWR)

    def has_ended(self, rank: int) -> bool:
        """Whether there were connections to a rank, and none of them is open at both ends any more."""
        if rank not in self._ending.values():
            return False
        with suppress(OSError):  # nothing is seen now
            return not any(self._ending.get(inode) == rank and _is_open(each) for inode, each in _tcp_sockets())
        return False

    def look(self) -> None:
        """End the connections to hosts that do not answer; before `settle`, find new ones. The thread calls it."""
        if not self._settled.is_set():
            self.guard()
        for host, each in self._to_other_hosts():
            owed_s = _owed_s(each)
            if owed_s is not None and owed_s >= SILENCE_S:
                self.silent.add(host)
                with suppress(OSError):  # the kernel was faster
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._thread.join()

    def is_alone(self) -> bool:
        """True: this process was connected to two other hosts or more, and all of them have fallen silent."""
        owing = {host for host, each in self._to_other_hosts() if _owed_s(each) is not None}
        return len(self._hosts) > 1 and self._hosts <= self.silent | owing

    def _to_other_hosts(self) -> Iterator[tuple[str, socket.socket]]:
        for inode, each in _tcp_sockets():
            host = _other_host(each) if inode in self._guarded else ""
            if host:
                self._hosts.add(host)  # not sooner: a connection that is still being made has no other end
                yield host, each

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with suppress(OSError):  # a script that opens too many files may close some
                self.look()


def connected(port: int) -> set[int]:
    """The inodes of this process's connections to a port, on any host; empty also where it can open no file more."""
    with suppress(OSError):
        found = ((inode, _ends(each)) for inode, each in _tcp_sockets())
        return {inode for inode, ends in found if ends is not None and ends.there_port == port}
    return set()


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process with its inode, as a handle that is closed when the next one is asked for.

    Only sockets are touched: to close a second handle of a file would release all locks that this process holds on it.

    Raises:
        OSError: this process can open no file more, as a look takes two.
    """
    for entry in _FILES.iterdir() if _FILES.is_dir() else ():
        try:
            if not entry.readlink().name.startswith("socket:"):
                continue
            number = os.dup(int(entry.name))
            try:
                each = socket.socket(fileno=number)
            except OSError:
                os.close(number)
                raise
            with each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    yield os.fstat(number).st_ino, each
        except OSError as error:  # it was closed while we looked
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise


def _ends(each: socket.socket) -> ConnectionEnds | None:
    """Both ends, written as both processes write them; None: there is no connection."""
    try:
        here, there = each.getsockname(), each.getpeername()
    except OSError:
        return None
    return ConnectionEnds(_plain(here[0]), here[1], _plain(there[0]), there[1])


def _plain(address: str) -> str:
    """Without an interface's name, and IPv4 as such: `fe80::1%eth0` and `::ffff:10.0.0.1` are one host's own words."""
    return address.partition("%")[0].removeprefix("::ffff:")


def _other_host(each: socket.socket) -> str:
    """The address at the other end; empty: this host's own, or there is no connection."""
    ends = _ends(each)
    return "" if ends is None or ends.here == ends.there else ends.there


def _info(each: socket.socket) -> tuple[int, ...]:
    return _TCP_INFO.unpack(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))


def _is_open(each: socket.socket) -> bool:
    try:
        return _info(each)[0] == _ESTABLISHED
    except OSError:
        return False


def _owed_s(each: socket.socket) -> float | None:
    """Seconds since the other kernel's last answer, where it owes one; None: it owes none, or all is over."""
    try:
        state, _, retransmits, probes, *rest = _info(each)
    except OSError:
        return None
    return rest[-1] / 1e3 if state == _ESTABLISHED and max(retransmits, probes) >= _UNANSWERED else None
