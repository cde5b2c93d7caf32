"""Where something runs: `worker:1/cuda:0` is device `cuda:0` of the process with rank 1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from assigner.errors import FormatError

_FORM = re.compile(r"worker:(\d+)/([a-z]+(?::\d+)?)")


@dataclass(frozen=True, order=True)
class Location:
    """One device of one process of a run.

    Args:
        rank: The process's rank in the run, 0 or more.
        device: The device as torch names it: `cpu`, `cuda:0`.
    """

    rank: int
    device: str

    @classmethod
    def parse(cls, text: str, *, where: str = "location") -> Location:
        """Read `worker:RANK/DEVICE`.

        Raises:
            FormatError: the text has another form; the message starts with `where`.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise FormatError(
                f"{where}: {text!r} is not a location", hint="write it as worker:0/cpu or worker:1/cuda:0"
            )
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"worker:{self.rank}/{self.device}"
