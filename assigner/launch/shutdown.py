"""The hosts of a run meet, and leave together: host 0 keeps the store open until the others have done with it.

They meet at a name, which is told within seconds, with whose it is, where it does not resolve. torch would try for as
long as for a rank that is late, in silence. Outside of Kubernetes such a name is wrong. In a pod it may appear when the
other pod is started: there it is said once, and waited for.

torchrun's hosts meet once more when their ranks have ended, in a store that lives in host 0's launcher. Host 0 is
through as soon as all have arrived, and a slow host then finds the store closed: the run has succeeded, and it prints a
page about a broken connection.

In the same store a launcher tells the other hosts that one of its ranks has died: one that was killed before it could
join the run has told nobody, and the others would wait for it. Ranks look there themselves once they join; a launcher
ends those that do not end by themselves.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # it is there, without `__all__`

from assigner.errors import UsageError, WorkerError
from assigner.formats.document import Name
from assigner.launch.limitedstore import LIMIT_S, limited, opened
from assigner.launch.seal import clean, read, seal_first, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

MEETING_S = 300
FAREWELL_S = 20.0
_LEFT = "assigner/left"
FAILED_KEY = "assigner/host failed"
"""Where a launcher tells of its first rank that ended badly."""
_ENDED = "assigner/ended well"
_DONE = "assigner/done"
_RUNS = "assigner/runs"
_SIGNALLED = "assigner/signalled"
_STAY_S = 1.1  # more than two looks of the others
_LOOK_S = 0.5
_LEAVING_S = 0.005
_GRACE_S = 3.0
_TELL_S = 2.0  # a launcher that a signal ends has not much time
_WRONG_S = 5.0  # a name server may be slow once
_PAUSE_S = 0.5
_POD = "KUBERNETES_SERVICE_HOST"


@dataclass(frozen=True)
class HostFailure:
    """The first rank of a run that ended badly, as its launcher tells.

    Args:
        how: How it ended, as the second half of a sentence.
        said: The error that it has handed over to its launcher; empty: none.
    """

    worker: str
    how: Name
    said: str = ""


def read_host_failure(store: Store) -> HostFailure | None:
    """What a launcher of this run has told; None: nothing. The store is the job's, without prefixes, as below."""
    return read(store, HostFailure, FAILED_KEY)


def tell_done(store: Store, rank: int) -> None:
    """A rank's process has ended with exit code 0, as its launcher tells."""
    write(store, f"{_DONE} {rank}", value=True)


def is_done(store: Store, rank: int) -> bool:
    """Whether a rank's launcher has told that."""
    return read(store, bool, f"{_DONE} {rank}") is True


def vouch(store: Store, rank: int, count: int) -> None:
    """A rank's process is not stopped, as its launcher tells again and again."""
    write(store, f"{_RUNS} {rank}", count)


def vouched(store: Store, rank: int) -> int:
    """How often a rank's launcher has told that; 0: it tells of no rank, as torchrun."""
    return read(store, int, f"{_RUNS} {rank}") or 0


def signalled(store: Store, rank: int | None) -> HostFailure | None:
    """How a rank (None: any) ends with its launcher, which a signal has ended, as that tells; None: none has told."""
    return read(store, HostFailure, f"{_SIGNALLED} {'any' if rank is None else rank}")


def wait_for_name(name: str, *, source: str, limit_s: float) -> None:
    """Return once a host's name resolves here; what is waited for is said once, on stderr.

    Args:
        name: The host's name or address.
        source: Who says that it is this one: `MASTER_ADDR`.
        limit_s: The longest wait of a pod for it.

    Raises:
        UsageError: it does not resolve.
    """
    begin, told = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:
            here = socket.gethostname()
            unknown = f"host {name!r}, where the ranks meet, is unknown on {here}: {error}; {source} names it"
        else:
            return
        waited_s = time.monotonic() - begin
        if waited_s > (limit_s if _POD in os.environ else min(limit_s, _WRONG_S)):
            raise UsageError(
                unknown, hint="set MASTER_ADDR to a name or an address of rank 0's host that all hosts know"
            )
        if waited_s > _WRONG_S and not told:
            told = True
            sys.stderr.write(f"waiting for up to {limit_s:g} s: {unknown}\n")
            sys.stderr.flush()
        time.sleep(_PAUSE_S)


def local_store(address: str, port: int = 0) -> TCPStore:
    """A store that only this host's processes can reach, at an address of its own; port 0: one that is free.

    Raises:
        OSError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listening:
        return TCPStore(
            address, listening.getsockname()[1], is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listening.detach(),
        )  # fmt: skip


class OtherHosts:
    """What one launcher tells those of the other hosts, and hears of them.

    Attributes:
        failure: Of another host, on which this one's ranks were ended.
    """

    def __init__(self, store: TCPStore, node: int, *, alone: bool = False) -> None:
        self.failure: HostFailure | None = None
        self.store, self._node, self._alone = store, node, alone
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="assigner-hosts", daemon=True)
        if not alone:
            self._thread.start()

    def tell(self, failure: HostFailure) -> None:
        """A rank of this host has failed."""
        if self._alone:
            return  # a launcher that is alone ends its ranks itself
        with suppress(DistError), limited(self.store) as store:  # host 0 is gone: nobody is left to hear it
            seal_first(store, FAILED_KEY, failure)
        self.stay()

    def tell_signal(self, name: str, ranks: Iterable[int]) -> None:
        """A signal ends this launcher, and with it the ranks of this host: what the others tell is late for it.

        Ranks that miss one of these learn why. No launcher ends for it: a signal to all leaves each host its time.
        """
        self._over.set()
        if self._alone:
            return
        how = f"was ended with its launcher, on {clean(socket.gethostname())}, by {name}"
        with suppress(DistError), limited(self.store, limit_s=_TELL_S) as store:
            for rank in ranks:
                for of in (rank, "any"):
                    write(store, f"{_SIGNALLED} {of}", HostFailure(f"worker:{rank}", how))

    def stay(self) -> None:
        """What has just been told is read: host 0 keeps the store."""
        time.sleep(_STAY_S if self._node == 0 and not self._alone else 0.0)

    def close(self) -> None:
        """Stop listening."""
        self._over.set()
        if not self._alone:
            self._thread.join()

    def _listen(self) -> None:
        """End this launcher with SIGTERM, which ends its ranks, some time after another host has failed."""
        failure = keeper = None
        with limited(self.store) as store:
            while failure is None:
                if self._over.wait(_LOOK_S):
                    return
                try:
                    if read(store, bool, _ENDED):
                        return
                    failure = read_host_failure(store)
                    keeper = signalled(store, 0) or keeper
                except DistError:
                    gone = "is gone: host 0, which keeps the run's store, does not answer"
                    failure = keeper or HostFailure("worker:0", gone)
        if not self._over.wait(_GRACE_S):
            self.failure = failure
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def leaving_together(*, nodes: int, node: int, address: str, port: int) -> Iterator[OtherHosts]:
    """Hold host 0's store open around a block, and until every host's block has ended well.

    The block gets the way to the other hosts' launchers.

    Args:
        nodes: Hosts of the run; one's store can be reached from there alone.
        node: This host's number.
        address: Address of host 0; of no use with one.
        port: The port of the store, which is shared with the launcher's own (`multi_tenant`); of no use with one.

    Raises:
        UsageError: the address is a name that nobody knows here.
        WorkerError: this host has no loopback address to open it at.
    """
    if nodes == 1:
        try:
            store = local_store("127.0.0.1")
        except OSError as error:
            raise WorkerError(
                f"the run's store cannot be opened at 127.0.0.1: {error.strerror or error}",
                hint="ranks of one host meet at its loopback address, which must be up (ip link set lo up)",
            ) from error
        yield OtherHosts(store, node, alone=True)
        return
    wait_for_name(address, source="--master-addr", limit_s=MEETING_S)
    meet = functools.partial(
        TCPStore, address, port, is_master=node == 0, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    store = opened(meet, port)
    others = OtherHosts(store.clone(), node)  # type: ignore[attr-defined]
    try:
        yield others
        if node == 0:
            with suppress(DistError):  # nobody listens any more
                write(store, _ENDED, value=True)
    finally:
        others.close()
    take_leave(store, nodes, stays=node == 0, limit_s=FAREWELL_S)


def take_leave(store: Store, members: int, *, stays: bool, limit_s: float) -> None:
    """Say that this member has left; whoever was later would find the store closed, and torch prints a page about that.

    Args:
        store: Where the members count themselves.
        members: How many there are.
        stays: This one keeps the store, and returns once all have left.
        limit_s: How long it stays at most, in seconds.
    """
    with suppress(DistError), limited(store, limit_s=min(limit_s, LIMIT_S)) as book:
        left = book.add(_LEFT, 1)
        until = time.monotonic() + limit_s
        while stays and left < members and time.monotonic() < until:  # who keeps it may have waited long enough
            time.sleep(_LEAVING_S)
            left = book.add(_LEFT, 0)
