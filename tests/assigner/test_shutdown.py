"""Hosts of a run leave together."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
from free_ports import free_ports
from listening import listening
from torch.distributed import DistError, HashStore

from assigner.errors import WorkerError
from assigner.launch import shutdown
from assigner.launch.seal import SECRET, read, seal_first, write
from assigner.launch.shutdown import (
    HostFailure,
    OtherHosts,
    is_done,
    leaving_together,
    read_host_failure,
    signalled,
    tell_done,
)
from assigner.runtime.failures.failure import FailureWatch


@pytest.fixture
def port() -> int:
    """A free one."""
    return free_ports(1)[0]


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


def test_one_hosts_store_listens_to_that_host_alone():
    """It is under the loopback address, at a port that is free."""
    with leaving_together(nodes=1, node=0, address="nowhere", port=0) as others:
        assert listening(others.store.port) == ["127.0.0.1"]


@pytest.mark.parametrize("found", ["", "true", "not JSON {", "[]", "\x1b]0;mine\x07", b"\xff\xfe", "[" * 100_000])
def test_what_a_stranger_writes_is_no_launchers_word(monkeypatch, found):
    """Of whatever shape: nobody has failed or ended; and the run's own word replaces it."""
    monkeypatch.setenv(SECRET, "of the run")
    store = HashStore()
    for name in (shutdown.FAILED_KEY, shutdown._ENDED, f"{shutdown._DONE} 0"):
        store.set(name, found)
    assert read_host_failure(store) is None
    assert not read(store, bool, shutdown._ENDED)
    assert not is_done(store, 0)
    tell_done(store, 0)
    assert is_done(store, 0)
    failure = HostFailure("worker:1", "was killed by SIGKILL")
    assert seal_first(store, shutdown.FAILED_KEY, failure) == failure == read_host_failure(store)


def test_a_word_of_another_run_is_a_strangers(monkeypatch):
    """Its secret differs."""
    store = HashStore()
    monkeypatch.setenv(SECRET, "of another run")
    seal_first(store, shutdown.FAILED_KEY, HostFailure("worker:1", "is mine"))
    monkeypatch.setenv(SECRET, "of the run")
    assert read_host_failure(store) is None


def test_a_host_that_comes_last_does_not_mind_that_host_0_is_gone(monkeypatch):
    """The run was good: a store that does not answer any more ends it well."""

    class Gone:
        def clone(self):
            return self

        def check(self, _):
            return False

        def add(self, *_):
            raise DistError("Connection reset by peer")

    ran = []
    monkeypatch.setattr(shutdown, "TCPStore", lambda *_, **__: Gone())
    with leaving_together(nodes=2, node=1, address="127.0.0.1", port=1):
        ran.append(True)
    assert ran


@pytest.fixture
def killed(monkeypatch):
    """The signals that a launcher sends itself; it need not wait for them long."""
    sent = []
    monkeypatch.setattr(shutdown, "_LOOK_S", 0.01)
    monkeypatch.setattr(shutdown, "_GRACE_S", 0.05)
    monkeypatch.setattr(shutdown, "_STAY_S", 0.0)
    monkeypatch.setattr(shutdown.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def wait_for(others: OtherHosts) -> None:
    others._thread.join(10)
    assert not others._thread.is_alive()


def test_a_launcher_ends_its_ranks_when_another_host_has_failed(killed):
    """The first failure that was told is known, and the launcher ends as Ctrl-C on it would, but for its message."""
    store = HashStore()
    here, there, late = OtherHosts(store, 1), OtherHosts(store, 2), OtherHosts(store, 0)
    there.tell(HostFailure("worker:2", "was killed by SIGKILL"))
    late.tell(HostFailure("worker:0", "ended with exit code 7"))
    wait_for(here)
    assert here.failure == read_host_failure(store) == HostFailure("worker:2", "was killed by SIGKILL")
    assert (os.getpid(), signal.SIGTERM) in killed
    for each in (here, there, late):
        each.close()


def test_a_launcher_ends_its_ranks_when_host_0_is_gone(killed):
    """Its store does not answer: nobody else can tell what happened."""

    class Gone:
        def check(self, _):
            raise DistError("Connection reset by peer")

    others = OtherHosts(Gone(), 1)
    wait_for(others)
    assert others.failure is not None
    assert others.failure.worker == "worker:0"
    others.close()


def test_a_launcher_lets_its_ranks_end_by_themselves(killed):
    """They know more: nothing is sent where the block is over within the time of grace, or host 0 ended well."""
    store = HashStore()
    others = OtherHosts(store, 1)
    others.close()
    write(store, shutdown._ENDED, value=True)
    done = OtherHosts(store, 1)
    wait_for(done)
    assert killed == []
    assert done.failure is None
    done.close()


def test_a_host_without_a_loopback_address_is_told(monkeypatch):
    """One line with the system's reason and what to do."""

    def refuse(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(shutdown.socket, "create_server", refuse)
    with (
        pytest.raises(WorkerError, match=r"127\.0\.0\.1: Cannot assign requested address"),
        leaving_together(nodes=1, node=0, address="", port=0),
    ):
        pass


def test_a_signal_to_one_launcher_is_told_and_ends_no_other(killed):
    """Ranks that miss those of its host learn of it; a launcher that has got one itself leaves its ranks their time."""
    store = HashStore()
    here, there = OtherHosts(store, 1), OtherHosts(store, 2)
    there.tell_signal("SIGTERM", [2, 3])
    time.sleep(0.1)
    assert here.failure is None
    assert [signalled(store, rank) is None for rank in range(4)] == [True, True, False, False]
    assert re.fullmatch(r"was ended with its launcher, on \S+, by SIGTERM", signalled(store, 3).how)
    here.tell(HostFailure("worker:1", "failed"))
    wait_for(there)
    assert there.failure is None
    wait_for(here)
    for each in (here, there):
        each.close()


def test_a_rank_that_misses_one_of_that_host_says_why():
    """Not that it is gone, cut off or stuck."""
    store = HashStore()
    OtherHosts(store, 2).tell_signal("SIGTERM", [2])
    watch = FailureWatch(store, "worker:1", ranks=3)
    watch.stay_s = 0.0
    try:
        found = str(watch.lost("worker:2/cpu", "a step", RuntimeError("closed")))
    finally:
        watch.close()
    assert re.match(r"worker:2 failed: its process was ended with its launcher, on \S+, by SIGTERM; worker:1", found)


def test_a_signal_to_host_0_is_why_its_store_is_gone(killed):
    """The launchers of other hosts say so, once it does not answer."""

    class Leaving(HashStore):
        looks = 0

        def check(self, keys):
            self.looks += 1
            if self.looks > 9:
                raise DistError("Connection reset by peer")
            return super().check(keys)

    store = Leaving()
    OtherHosts(store, 0).tell_signal("SIGINT", [0])
    others = OtherHosts(store, 1)
    wait_for(others)
    assert others.failure.worker == "worker:0"
    assert others.failure.how.endswith("by SIGINT")
    others.close()
