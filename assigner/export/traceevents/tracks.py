"""Tracks: where slices lie so that none crosses another, on a grid of time that no viewer rounds.

The format counts in microseconds, with a fraction if one likes. Perfetto turns them into whole nanoseconds and cuts off
what is below, so that neighbours may cross by one; the Trace Viewer of Chrome compares ends by whole microseconds, so
that shorter slices seem to lie in each other. On whole microseconds both see what is meant. A slice takes at least one;
its exact time is in its arguments.

Slices of one track follow each other. One that begins while all tracks of its name are busy gets a further track:

    sends -> worker:1       ████ 0 ████    ████ 2 ████
    sends -> worker:1 (2)        ████ 1 ████
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLACK = 20
"""Microseconds: neighbours that cross by no more, since a slice takes at least one, are set one behind the other."""


def microseconds(seconds: float) -> int:
    """The microsecond that is nearest to a time."""
    return round(1e6 * seconds)


class SlicePlace(NamedTuple):
    """Where a slice lies; `start` and `end` in microseconds, at least one apart."""

    pid: int
    tid: int
    start: int
    end: int


class Track(NamedTuple):
    """One row of a process: its number, which no other process has, its name, and where it stands."""

    tid: int
    name: str
    order: int


class Tracks:
    """The tracks of one process, made as they are needed.

    Args:
        pid: The process.
        numbers: Gives a new track its number.
    """

    def __init__(self, pid: int, numbers: Iterator[int]) -> None:
        self.pid, self._numbers = pid, numbers
        self.made: list[Track] = []
        self._free: dict[str, list[list[int]]] = defaultdict(list)  # by name: [tid, when it is free]

    def place(self, name: str, order: int, start: int, end: int) -> SlicePlace:
        """Put a slice on a track; slices come in the order of their starts.

        Args:
            name: Of the track.
            order: Where the track stands in its process.
            start: In microseconds.
            end: In microseconds.
        """
        rows = self._free[name]
        row = next((each for each in rows if start >= each[1] - _SLACK), None)
        if row is None:
            row = [next(self._numbers), start]
            rows.append(row)
            self.made.append(Track(row[0], name if len(rows) == 1 else f"{name} ({len(rows)})", order))
        start = max(start, row[1])
        row[1] = max(end, start + 1)
        return SlicePlace(self.pid, row[0], start, row[1])
