"""Calls of a store that does not answer, as that of a process that was stopped."""

from __future__ import annotations

import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest
from stopped_store import StoppedStore, stopped_store
from torch.distributed import DistError, HashStore, PrefixStore

from assigner.launch.limitedstore import LimitedStore, StoreSilentError, limited, opened
from assigner.launch.shutdown import take_leave

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stopped() -> Iterator[StoppedStore]:
    with stopped_store() as found:
        yield found


def test_a_call_ends_where_the_store_does_not_answer(stopped: StoppedStore) -> None:
    """Also one through a prefix, and the next one; when it answers again, so does this one."""
    with limited(stopped, limit_s=0.5) as store:
        beside = LimitedStore(PrefixStore("run", stopped), beside=store)
        for each in (store, beside, PrefixStore("run", store)):
            with pytest.raises(StoreSilentError, match=r"has not answered for"):
                each.check(["key"])
        assert store.is_silent
        assert beside.is_silent
        stopped.goes_on.set()
        while store.is_silent:
            time.sleep(0.01)
        stopped.set("key", "")
    with limited(stopped) as store:
        assert store.check(["key"])


def test_what_the_store_says_is_passed_on() -> None:
    """Values, and errors."""

    class Gone(HashStore):
        def get(self, _: str) -> bytes:
            raise DistError("Connection reset by peer")

    with limited(Gone()) as store:
        assert store.compare_set("key", "", "value") == b"value"
        assert store.multi_get(["key"]) == [b"value"]
        assert (store.add("number", 2), store.add("number", 1)) == (2, 3)
        with pytest.raises(DistError, match="reset by peer"):
            store.get("key")
        assert not store.is_silent


def test_whoever_leaves_does_not_wait_for_a_stopped_store(stopped: StoppedStore) -> None:
    """Its time is that of a store which is there."""
    take_leave(stopped, 2, stays=True, limit_s=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are looked at in /proc")
def test_a_program_that_has_the_port_and_says_nothing_is_no_store() -> None:
    """One connection that stays without an answer is told; those that end, and are made again, are torch's to count."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]

        def meets(tries: int, wait_s: float) -> HashStore:
            for _ in range(tries):
                with socket.create_connection(("127.0.0.1", port)) as each:
                    each.settimeout(wait_s)
                    try:
                        each.recv(1)
                    except TimeoutError:
                        continue
            return HashStore()

        assert opened(lambda: meets(10, 0.1), port, limit_s=0.5) is not None
        with pytest.raises(StoreSilentError, match=r"takes connections, and has not answered for 0.5 s"):
            opened(lambda: meets(1, 5.0), port, limit_s=0.5)
