"""The hosts of a run leave together: host 0 keeps the store open until the others have done with it.

torchrun's hosts meet once more when their ranks have ended, in a store that lives in host 0's launcher. Host 0 is
through as soon as all have arrived, and a slow host then finds the store closed: the run has succeeded, and it prints a
page about a broken connection.

In the same store a launcher tells the other hosts that one of its ranks has died: one that was killed before it could
join the run has told nobody, and the others would wait for it. Ranks look there themselves once they join; a launcher
ends those that do not end by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # it is there, without `__all__`

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

MEETING_S = 300
FAREWELL_S = 20.0
_LEFT = "assigner/left"
_FAILED = "assigner/host failed"
_ENDED = "assigner/ended well"
_STAY_S = 1.1  # more than two looks of the others
_LOOK_S = 0.5
_GRACE_S = 3.0


@dataclass(frozen=True)
class HostFailure:
    """The first rank of a run that ended badly, as its launcher tells.

    Args:
        worker: The rank.
        how: How it ended, as the second half of a sentence.
    """

    worker: str
    how: str


def read_host_failure(store: Store) -> HostFailure | None:
    """What a launcher has told; None: nothing.

    Args:
        store: The job's, without prefixes.
    """
    if not store.check([_FAILED]):
        return None
    return HostFailure(**json.loads(store.get(_FAILED)))


class OtherHosts:
    """What one launcher tells those of the other hosts, and hears of them.

    Args:
        store: The job's; None: there are no others.
        node: This host's number.

    Attributes:
        failure: Of another host, on which this one's ranks were ended.
    """

    def __init__(self, store: Store | None, node: int) -> None:
        self.failure: HostFailure | None = None
        self._store, self._node = store, node
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="assigner-hosts", daemon=True)
        if store is not None:
            self._thread.start()

    def tell(self, failure: HostFailure) -> None:
        """A rank of this host has failed."""
        if self._store is None:
            return  # a launcher that is alone ends its ranks itself
        with suppress(DistError):  # host 0 is gone: nobody is left to hear it
            self._store.compare_set(_FAILED, "", json.dumps(asdict(failure)))
            time.sleep(_STAY_S if self._node == 0 else 0.0)

    def close(self) -> None:
        """Stop listening."""
        self._over.set()
        if self._store is not None:
            self._thread.join()

    def _listen(self) -> None:
        """End this launcher with SIGTERM, which ends its ranks, some time after another host has failed."""
        assert self._store is not None
        failure = None
        while failure is None:
            if self._over.wait(_LOOK_S):
                return
            try:
                if self._store.check([_ENDED]):
                    return
                failure = read_host_failure(self._store)
            except DistError:
                failure = HostFailure("worker:0", "is gone: host 0, which keeps the run's store, does not answer")
        if not self._over.wait(_GRACE_S):
            self.failure = failure
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def leaving_together(*, nodes: int, node: int, address: str, port: int) -> Iterator[OtherHosts]:
    """Hold host 0's store open around a block, and until every host's block has ended well.

    The block gets the way to the other hosts' launchers.

    Args:
        nodes: Hosts of the run; with one nothing is done.
        node: This host's number.
        address: Address of host 0.
        port: The port of the store, which is shared with the launcher's own (`multi_tenant`).
    """
    if nodes == 1:
        yield OtherHosts(None, node)
        return
    store = TCPStore(
        address, port, is_master=node == 0, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    others = OtherHosts(store.clone(), node)  # type: ignore[attr-defined]
    try:
        yield others
        if node == 0:
            with suppress(DistError):  # nobody listens any more
                store.set(_ENDED, "")
    finally:
        others.close()
    try:
        left = store.add(_LEFT, 1)
        until = time.monotonic() + FAREWELL_S
        while node == 0 and left < nodes and time.monotonic() < until:
            time.sleep(0.02)
            left = store.add(_LEFT, 0)
    except DistError:
        return  # host 0 has waited long enough and is gone: nobody is left to take leave of
