"""Which measurements are wanted: what `assigner profile --only` names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

COMPUTE, LINKS = "compute", "links"
_WORKER = r"worker:(\d+)(?:/[a-z]+(?::\d+)?)?"
_ONE, _PAIR = re.compile(_WORKER), re.compile(f"{_WORKER}-{_WORKER}")


@dataclass(frozen=True)
class Selection:
    """A choice of a profile's measurements.

    Args:
        words: `compute` or `links`, a worker (`worker:1`: its partitions and its links), a pair of workers
            (`worker:0-worker:1`: its links both ways), or a pattern of partition names (`blocks.*`). They add up;
            none: everything.
    """

    words: tuple[str, ...] = ()

    def point(self, partitions: Iterable[str], rank: int) -> bool:
        """Whether partitions that share measurements are wanted on a worker."""
        names = list(partitions)
        return not self.words or any(
            word == COMPUTE or _ranks(word) == (rank,) or any(self._names(word, name) for name in names)
            for word in self.words
        )

    def link(self, source: int, target: int) -> bool:
        """Whether the link from one rank to another is wanted."""
        ends = {source, target}
        return not self.words or any(
            word == LINKS or _ranks(word) in ((source,), (target,)) or (set(_ranks(word)) == ends)
            for word in self.words
        )

    def check(self, partitions: Collection[str], ranks: int) -> None:
        """Refuse words that name nothing.

        Raises:
            UsageError: a word names no rank of this run and no partition of the model.
        """
        for word in self.words:
            far = [rank for rank in _ranks(word) if rank >= ranks]
            if far:
                raise UsageError(
                    f"--only {word}: there is no worker:{far[0]}; the run has {ranks} ranks, from worker:0"
                )
            if len(_ranks(word)) == 2 and len(set(_ranks(word))) == 1:
                raise UsageError(f"--only {word}: a worker has no link to itself")
            if word not in (COMPUTE, LINKS) and not _ranks(word) and not any(self._names(word, n) for n in partitions):
                raise UsageError(
                    f"--only {word!r} names no partition: there are {', '.join(list(partitions)[:4])}, ...",
                    hint="name partitions ('blocks.*'), worker:1, worker:0-worker:1, compute or links",
                )

    @staticmethod
    def _names(word: str, partition: str) -> bool:
        return word not in (COMPUTE, LINKS) and not _ranks(word) and fnmatchcase(partition, word)


def _ranks(word: str) -> tuple[int, ...]:
    """The ranks that a word names: one, the two of a pair, or none."""
    found = _ONE.fullmatch(word) or _PAIR.fullmatch(word)
    return tuple(int(rank) for rank in found.groups()) if found else ()
