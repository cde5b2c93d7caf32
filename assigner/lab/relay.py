"""What the hosts say, line by line, each line with its host's name in front."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

CHUNK = 1 << 16
LONGEST = 1 << 20
"""Bytes that wait for the end of their line; more are passed on as a line of their own."""


@dataclass
class _Source:
    prefix: str
    write: Callable[[str], None]
    rest: bytes = b""


class Relay:
    """Reads any number of pipes at once."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._muted = False

    def mute(self) -> None:
        """Read on, and say nothing more."""
        self._muted = True

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, pipe: IO[bytes], prefix: str, write: Callable[[str], None]) -> None:
        """Read a pipe from now on; `write` gets its complete lines with `prefix` in front."""
        self._selector.register(pipe, selectors.EVENT_READ, _Source(prefix, write))

    def pump(self, seconds: float) -> None:
        """Pass on what there is; wait for it up to `seconds`."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            chunk = os.read(key.fd, CHUNK)
            if not chunk:
                self._end(key)
                continue
            source: _Source = key.data
            *lines, source.rest = (source.rest + chunk).split(b"\n")
            if len(source.rest) > LONGEST:
                lines, source.rest = [*lines, source.rest], b""
            self._say(source, lines)

    def drain(self, seconds: float) -> None:
        """Read to the end of all pipes, for up to `seconds`: a process left over may hold one open."""
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < deadline:
            self.pump(0.05)
        for key in list(self._selector.get_map().values()):
            self._end(key)

    def _end(self, key: selectors.SelectorKey) -> None:
        source: _Source = key.data
        self._selector.unregister(key.fileobj)
        if source.rest:
            self._say(source, [source.rest])
            source.rest = b""

    def _say(self, source: _Source, lines: list[bytes]) -> None:
        if lines and not self._muted:
            source.write("".join(f"{source.prefix}{line.decode(errors='replace')}\n" for line in lines))
