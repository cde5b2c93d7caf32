"""Where something runs: `worker:1/cuda:0` is device `cuda:0` of the process with rank 1."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from assigner.errors import FormatError

MOST_RANKS = 65_536
_FORM = re.compile(r"worker:(0|[1-9][0-9]*)/([a-z]+(?::(?:0|[1-9][0-9]*))?)")


@dataclass(frozen=True, order=True)
class Location:
    """One device of one process of a run: the process's rank, below `MOST_RANKS`, and the device as torch names it."""

    rank: int
    device: str

    @classmethod
    def parse(cls, text: str, *, where: str = "location") -> Location:
        """Read `worker:RANK/DEVICE`.

        Raises:
            FormatError: the text has another form, or no run has such a rank; the message starts with `where`.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise FormatError(
                f"{where}: {text!r} is not a location", hint="write it as worker:0/cpu or worker:1/cuda:0"
            )
        if len(match[1]) > len(str(MOST_RANKS)) or int(match[1]) >= MOST_RANKS:
            raise FormatError(
                f"{where}: {text!r} is not allowed; a run has at most {MOST_RANKS:,} ranks", hint="ranks count from 0"
            )
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"worker:{self.rank}/{self.device}"


@functools.cache
def rank_of(worker: str) -> int:
    """The rank of a worker's name, `worker:1/cuda:0`; errors as `Location.parse`."""
    return Location.parse(worker).rank


def rank_name(worker: str) -> str:
    """`worker:1` of `worker:1/cpu`: a worker by its rank alone."""
    return worker.partition("/")[0]
