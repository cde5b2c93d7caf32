"""The kernel watches the wires of a run's connections, and of nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing

import pytest
from free_ports import free_ports

from assigner.launch import sockets
from assigner.launch.sockets import Connections

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells how a connection fares")


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def is_guarded(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def mirrored(connections: Connections, ours: list[socket.socket]) -> dict[int, list[sockets.ConnectionEnds]]:
    """The ends as another rank would tell them that holds the far ends of `ours`."""
    names = [each.getsockname() for each in ours]
    return {1: [each.mirrored for each in connections.ends() if (each.here, each.here_port) in names]}


def close_all(*pairs: tuple[socket.socket, socket.socket]) -> None:
    for each in pairs:
        each[0].close()
        each[1].close()


def test_only_the_runs_own_are_guarded():
    """The user's, from before, meanwhile and after, stay as they are; `guard` adds later ones to the store."""
    before = pair()
    with closing(Connections(port=1)) as connections:
        run, meanwhile = pair(), pair()
        connections.settle(mirrored(connections, [run[0]]))
        after = pair()
        connections.guard()
        assert [is_guarded(each) for each in before + meanwhile + after] == [False] * 6
        assert [is_guarded(each) for each in run] == [True, False]
        with socket.create_server(("127.0.0.1", 0)) as store:
            connections._port = store.getsockname()[1]
            client = socket.create_connection(store.getsockname()), store.accept()[0]
            connections.guard()
            assert [is_guarded(each) for each in client] == [True, True]
            close_all(client)
    close_all(before, run, meanwhile, after)


def test_a_launcher_guards_all_that_it_opens():
    """Its process runs nobody else's code."""
    with closing(Connections()) as connections:
        opened = pair()
        connections.guard()
        assert [is_guarded(each) for each in opened] == [True, True]
        close_all(opened)


def test_hanging_up_reaches_the_other_end_whoever_holds_the_socket():
    """The peer reads the end at once; what a thread of the user's opened meanwhile still carries data."""
    with closing(Connections(port=1)) as connections:
        users, (near, far) = pair(), pair()
        connections.settle(mirrored(connections, [near]))
        connections.hang_up()
        far.settimeout(30)
        users[1].settimeout(30)
        assert far.recv(1) == b""
        users[0].sendall(b"u")
        assert users[1].recv(1) == b"u"
        close_all(users, (near, far))


def test_a_lack_of_file_descriptors_ends_no_watch(monkeypatch):
    """What cannot be looked at has not ended, and the next look comes, by when files may be closed."""
    looks, dup = threading.Semaphore(0), os.dup

    def none_left(_):
        looks.release()
        raise OSError(errno.EMFILE, "Too many open files")

    with closing(Connections(port=1)) as connections:
        near, far = pair()
        connections.settle(mirrored(connections, [near]))
        monkeypatch.setattr(os, "dup", none_left)
        assert [looks.acquire(timeout=30) for _ in range(2)] == [True, True]
        assert not connections.has_ended(1)
        monkeypatch.setattr(os, "dup", dup)
        close_all((near, far))
        assert connections.has_ended(1)
        assert connections._thread.is_alive()


@pytest.mark.long
@pytest.mark.distributed
def test_a_users_connection_survives_a_run_with_a_late_rank(tmp_path, programs):
    """One opened while rank 0 waits for rank 1, to a server outside of the run, works after the group is left."""
    code = tmp_path / "rank.py"
    code.write_text(LATE)
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free)}
        common.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        ranks = [
            subprocess.Popen([programs / "python", code, str(port)], env={**common, "RANK": str(rank)})
            for rank in (0, 1)
        ]
        try:
            outside.settimeout(600)
            there = outside.accept()[0]
            there.settimeout(600)
            with there:
                assert there.recv(1) == b"u"
            assert [each.wait(600) for each in ranks] == [0, 0]
        finally:
            for each in ranks:
                each.kill()
                each.wait()


LATE = """
import os, socket, sys, threading, time
import torch.distributed as dist
from assigner.machine.launchedrank import launched
from assigner.runtime.messages.rendezvous import farewell, group_connections, join_group, leave_group

rank = int(os.environ["RANK"])
own = []
def call():
    time.sleep(0.5)
    own.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
if rank == 0:
    thread = threading.Thread(target=call)
    thread.start()
else:
    time.sleep(2)
join_group(launched(), 120.0)
assert group_connections()._ending, "the group's own are known"
dist.barrier()  # who leaves ends the other's connection
goodbye = farewell()
leave_group()
if rank == 0:
    thread.join()
    assert not own[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    own[0].sendall(b"u")
goodbye()
"""


def test_locks_on_files_stay(tmp_path):
    """To look for sockets releases no lock that this process holds on a file: another process still cannot take it."""
    path = tmp_path / "data.sqlite"
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with closing(Connections()) as connections:
            connections.guard()
            done = subprocess.run([sys.executable, "-c", take, path], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in done.stderr


def test_a_connection_that_is_still_being_made_gets_its_host_later(monkeypatch):
    """A host is known as soon as there is another end, also where the connection was guarded before."""
    monkeypatch.setattr(sockets, "_LOOK_S", 60.0)
    hosts: dict[object, str] = {}
    monkeypatch.setattr(sockets, "_other_host", lambda each: hosts.get(each.getsockname(), ""))
    monkeypatch.setattr(sockets, "_owed_s", lambda _: 1.0)
    with closing(Connections()) as connections:
        first, second = pair(), pair()
        connections.guard()
        hosts[first[0].getsockname()] = "10.0.0.2"
        assert not connections.is_alone()
        hosts[second[0].getsockname()] = "10.0.0.3"
        assert connections.is_alone()
        close_all(first, second)


def test_a_silent_host_is_ended_and_a_slow_one_is_not(monkeypatch):
    """Ended: five seconds without an answer although one is owed. All hosts silent: this one is alone."""
    hosts = {}
    monkeypatch.setattr(sockets, "_other_host", lambda each: hosts.get(each.fileno() and each.getsockname(), ""))
    fares = {}
    monkeypatch.setattr(sockets, "_owed_s", lambda each: fares.get(each.getsockname()))
    monkeypatch.setattr(sockets, "_LOOK_S", 600.0)  # the thread's part is called by hand
    with closing(Connections()) as connections:
        (one, far), (two, away) = pair(), pair()
        hosts.update({one.getsockname(): "10.0.0.2", two.getsockname(): "10.0.0.3"})
        fares[one.getsockname()] = 6.0
        fares[two.getsockname()] = None
        connections.settle()
        far.settimeout(30)
        connections.look()
        assert far.recv(1) == b""
        assert connections.silent == {"10.0.0.2"}
        assert not connections.is_alone()
        fares[two.getsockname()] = 3.0
        assert connections.is_alone()
        assert connections.silent == {"10.0.0.2"}
        for each in (one, far, two, away):
            each.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_a_host_is_one_by_whatever_socket_it_comes(monkeypatch):
    """Through a socket that speaks IPv6 too, as a store's, an IPv4 address is written otherwise."""
    monkeypatch.setattr(sockets, "_LOOK_S", 600.0)
    two = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with closing(Connections()) as connections, ExitStack() as stack:
        for address, how in ((("127.0.0.1", 0), {}), (("::", 0), two)):
            server = stack.enter_context(socket.create_server(address, **how))
            there = "127.0.0.1", server.getsockname()[1]
            stack.enter_context(socket.create_connection(there, source_address=("127.0.0.2", 0)))
            stack.enter_context(server.accept()[0])
        connections.guard()
        assert {host for host, _ in connections._to_other_hosts()} == {"127.0.0.1", "127.0.0.2"}
