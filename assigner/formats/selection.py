"""Which measurements are wanted: what `assigner profile --only` names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

COMPUTE, LINKS, COLLECTIVES = "compute", "links", "collectives"
_SORTS = (COMPUTE, LINKS, COLLECTIVES)
_WORKER = r"worker:(\d+)(?:/[a-z]+(?::\d+)?)?"
_ONE, _PAIR = re.compile(_WORKER), re.compile(f"{_WORKER}-{_WORKER}")


@dataclass(frozen=True)
class Selection:
    """A choice of a profile's measurements.

    Args:
        words: `compute`; `links`, with the collectives that correct them; `collectives` alone; a worker (`worker:1`:
            its partitions, its links, and the collectives that it takes part in); a pair of workers
            (`worker:0-worker:1`: its links both ways and its collective); or a pattern of partition names
            (`blocks.*`). They add up; none: everything.
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

    def collective(self, ranks: Iterable[int]) -> bool:
        """Whether the collective of some ranks is wanted."""
        members = set(ranks)
        return not self.words or any(
            word in (LINKS, COLLECTIVES)
            or (len(_ranks(word)) == 1 and members.issuperset(_ranks(word)))
            or set(_ranks(word)) == members
            for word in self.words
        )

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks that are named as such, the lower one first."""
        found = (_ranks(word) for word in self.words)
        return tuple((min(each), max(each)) for each in found if len(each) == 2)

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
            if word not in _SORTS and not _ranks(word) and not any(self._names(word, n) for n in partitions):
                raise UsageError(
                    f"--only {word!r} names no partition: there are {', '.join(list(partitions)[:4])}, ...",
                    hint="name partitions ('blocks.*'), worker:1, worker:0-worker:1, compute, links or collectives",
                )

    @staticmethod
    def _names(word: str, partition: str) -> bool:
        return word not in _SORTS and not _ranks(word) and fnmatchcase(partition, word)


def _ranks(word: str) -> tuple[int, ...]:
    """The ranks that a word names: one, the two of a pair, or none."""
    found = _ONE.fullmatch(word) or _PAIR.fullmatch(word)
    return tuple(int(rank) for rank in found.groups()) if found else ()
