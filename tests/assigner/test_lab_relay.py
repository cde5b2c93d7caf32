"""What hosts say, line by line."""

from __future__ import annotations

import os

import pytest

from assigner.lab import running
from assigner.lab.running import Relay


@pytest.fixture
def pipe():
    """Both ends of a pipe: one to read, one to write."""
    reading, writing = (os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    yield reading, writing
    reading.close()
    writing.close()


def test_lines_are_passed_on_when_they_are_whole(pipe):
    """Half a line waits for its other half; the last one needs no end."""
    said: list[str] = []
    reading, writing = pipe
    with Relay() as relayed:
        relayed.add(reading, "[a] ", said.append)
        writing.write(b"one\ntw")
        relayed.pump(0)
        assert said == ["[a] one\n"]
        writing.write(b"o\nrest")
        writing.close()
        relayed.drain(1)
    assert "".join(said) == "[a] one\n[a] two\n[a] rest\n"


def test_a_line_without_end_does_not_grow_for_ever(pipe, monkeypatch):
    """What is too long to wait for is passed on as a line of its own."""
    monkeypatch.setattr(running, "LONGEST", 8)
    said: list[str] = []
    reading, writing = pipe
    with Relay() as relayed:
        relayed.add(reading, "[a] ", said.append)
        for part in (b"01234", b"56789", b"x\n"):
            writing.write(part)
            relayed.pump(0)
    assert said == ["[a] 0123456789\n", "[a] x\n"]
