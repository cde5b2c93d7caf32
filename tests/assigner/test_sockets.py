"""The kernel watches the wires of a run's connections, and of nothing else."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from assigner import sockets
from assigner.sockets import Connections

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells how a connection fares")


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def is_guarded(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_only_what_is_opened_between_is_guarded():
    """The user's own connections, from before and after, stay as they are; `guard` adds later ones."""
    before = pair()
    with closing(Connections()) as connections:
        run = pair()
        connections.settle()
        own, asked = pair(), pair()
        for each in own:
            each.close()
        assert [is_guarded(each) for each in before + run + asked] == [False, False, True, True, False, False]
        connections.guard()
        assert [is_guarded(each) for each in before + run + asked] == [False, False, True, True, True, True]
    for each in before + run + asked:
        each.close()


def test_hanging_up_reaches_the_other_end_whoever_holds_the_socket():
    """The peer reads the end at once; what was kept still carries data, and a listener still listens."""
    with closing(Connections()) as connections, socket.create_server(("127.0.0.1", 0)) as server:
        kept = pair()
        connections.keep()
        near, far = pair()
        with socket.create_server(("127.0.0.1", 0)) as ours:
            connections.settle()
            connections.hang_up()
            assert far.recv(1) == b""
            kept[0].sendall(b"k")
            assert kept[1].recv(1) == b"k"
            socket.create_connection(ours.getsockname()).close()
            socket.create_connection(server.getsockname()).close()
        for each in (near, far, *kept):
            each.close()


def test_a_silent_host_is_ended_and_a_slow_one_is_not(monkeypatch):
    """Ended: five seconds without an answer although one is owed. All hosts silent: this one is alone."""
    hosts = {}
    monkeypatch.setattr(sockets, "_other_host", lambda each: hosts.get(each.fileno() and each.getsockname(), ""))
    fares = {}
    monkeypatch.setattr(sockets, "_answers", lambda each: fares.get(each.getsockname()))
    with closing(Connections()) as connections:
        (one, far), (two, away) = pair(), pair()
        hosts.update({one.getsockname(): "10.0.0.2", two.getsockname(): "10.0.0.3"})
        fares[one.getsockname()] = sockets._Answers(missing=True, silent_s=6.0)
        fares[two.getsockname()] = sockets._Answers(missing=False, silent_s=60.0)
        connections.settle()
        assert far.recv(1) == b""
        assert connections.silent == {"10.0.0.2"}
        assert not connections.is_alone()
        fares[two.getsockname()] = sockets._Answers(missing=True, silent_s=3.0)
        assert connections.is_alone()
        assert connections.silent == {"10.0.0.2"}
        for each in (one, far, two, away):
            each.close()
