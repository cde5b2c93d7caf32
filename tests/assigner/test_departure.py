"""Hosts of a run leave together."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch.distributed import DistError

from assigner import departure
from assigner.departure import leaving_together


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_host_0_stays_until_the_others_have_left(port):
    """Its block ends first, and it goes last: the store that the others still read is its own."""
    ended = []

    def leave(node, seconds):
        with leaving_together(nodes=2, node=node, address="127.0.0.1", port=port):
            time.sleep(seconds)
            ended.append(f"block {node}")
        ended.append(f"host {node}")

    threads = [threading.Thread(target=leave, args=(node, 0.5 * node)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended.index("block 0") < ended.index("block 1") < ended.index("host 0")


def test_nobody_waits_after_a_failure(port):
    """A host whose block fails leaves at once, host 0 too."""
    with pytest.raises(ValueError, match="lost"), leaving_together(nodes=2, node=0, address="127.0.0.1", port=port):
        raise ValueError("lost")


def test_one_host_needs_no_store(monkeypatch):
    """Nothing is opened where nobody else could read it, and the block runs."""
    ran = []
    monkeypatch.setattr(departure, "TCPStore", lambda *_, **__: pytest.fail("a store is opened"))
    with leaving_together(nodes=1, node=0, address="nowhere", port=0):
        ran.append(True)
    assert ran


def test_a_host_that_comes_last_does_not_mind_that_host_0_is_gone(monkeypatch):
    """The run was good: a store that does not answer any more ends it well."""

    class Gone:
        def add(self, *_):
            raise DistError("Connection reset by peer")

    ran = []
    monkeypatch.setattr(departure, "TCPStore", lambda *_, **__: Gone())
    with leaving_together(nodes=2, node=1, address="host", port=1):
        ran.append(True)
    assert ran
