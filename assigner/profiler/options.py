"""What is asked of a profiling run, and where its file goes; knows no torch, since the command line reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from assigner.errors import UsageError
from assigner.formats.terms import Backend
from assigner.settings import EACH, NAMES, NUMBERS, SHARE, Flag, check

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

Links = Literal["auto", "all", "sampled"]

RESERVE = 0.08
"""Share of a worker's memory that plans leave alone, unless it is asked otherwise."""

WORKLOAD, RANKS, MEASURING = "The workload", "Ranks on this host", "Measuring"
"""The headings of the flags."""


@dataclass(frozen=True)
class ProfileOptions:
    """Settings of a profiling run; what their flags' help does not say, None and what is empty, is beside them.

    Raises:
        UsageError: a value that cannot be used; the message names it.
    """

    marks: Annotated[
        tuple[str, ...],
        Flag(
            help="Name pattern of partitions: 'blocks.*'. Repeatable; replaces the workload's own patterns;"
            " marks in code stay.",
            panel=WORKLOAD,
            flag="--mark",
            form=EACH,
        ),
    ] = ()
    # those of a host's ranks, in their order; empty: a GPU of its own where there is one, else the CPU
    devices: Annotated[
        tuple[str, ...],
        Flag(help="Device of each local rank: 'cpu,cuda:0'. Default: GPUs.", panel=RANKS, metavar="D,D", form=NAMES),
    ] = ()
    # empty: those of 16 and 4 micro-batches, and the batch
    micro_batches: Annotated[
        tuple[int, ...],
        Flag(help="Micro-batch sizes to measure, in samples.", panel=MEASURING, metavar="N,N", form=NUMBERS),
    ] = ()
    # in bytes; None: the largest that a plan could send
    max_message: Annotated[
        int | None,
        Flag(help="Largest message of the link sweeps.", panel=MEASURING, metavar="BYTES", least=1024),
    ] = None
    reserve: Annotated[
        float | None,
        Flag(
            help="Share of memory that plans leave alone, 0.08 unless given; with --only the file's own stays.",
            panel=MEASURING,
            allowed=SHARE,
        ),
    ] = None
    # links are measured so; None: NCCL between GPUs that a rank has for itself, gloo otherwise
    backend: Annotated[
        Backend | None,
        Flag(help="What carries messages, as for Pipeline; mpi under mpirun or srun.", panel=MEASURING),
    ] = None
    isolated: Annotated[bool, Flag(help="One worker at a time, not all at once.", panel=MEASURING)] = False
    links: Annotated[Links, Flag(help="Links to measure; auto: all of up to 16 workers.", panel=MEASURING)] = "auto"
    force_busy: Annotated[
        bool,
        Flag(help="Measure however busy the machine is: nothing twice, nothing refused.", panel=MEASURING),
    ] = False
    split_backward: Annotated[
        bool,
        Flag(help="Time the input and the weight part of backwards too.", panel=MEASURING),
    ] = False
    timeout_s: float = 600.0  # a wait for another rank that takes longer ends the run

    def __post_init__(self) -> None:
        check(self)
        if any(size < 1 for size in self.micro_batches):
            raise UsageError(f"micro-batch sizes {self.micro_batches}: each is 1 or more")

    @property
    def reserved(self) -> float:
        """Share of a worker's memory that plans leave alone."""
        return RESERVE if self.reserve is None else self.reserve


@dataclass(frozen=True)
class ProfileDestination:
    """Where a profile goes, and what it starts from."""

    path: Path  # the profile's file; until it is written, each rank's journal lies beside it
    force: bool = False  # an existing file is replaced
    resume: bool = False  # go on with the journals that an interrupted run left
    # what is measured again (see `Selection`): the profile at `path` is updated. Empty: everything
    only: tuple[str, ...] = ()
    # files of other workers' profiles that are added. Rank 0 reads them, and what else is said here of files
    others: tuple[Path, ...] = ()
    notice: Callable[[str], None] = lambda _text: None  # called with what the user should know


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
        return self._has(
            lambda word, of: word == COMPUTE or of == (rank,) or any(self._names(word, name) for name in names)
        )

    def link(self, source: int, target: int) -> bool:
        """Whether the link from one rank to another is wanted."""
        return self._has(lambda word, of: word == LINKS or of in ((source,), (target,)) or set(of) == {source, target})

    def collective(self, ranks: Iterable[int]) -> bool:
        """Whether the collective of some ranks is wanted."""
        members = set(ranks)
        return self._has(
            lambda word, of: word in (LINKS, COLLECTIVES) or set(of) == members or (len(of) == 1 and of[0] in members)
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

    def _has(self, names: Callable[[str, tuple[int, ...]], bool]) -> bool:
        """Whether a word names something, by itself or by its ranks; no words name everything."""
        return not self.words or any(names(word, _ranks(word)) for word in self.words)

    @staticmethod
    def _names(word: str, partition: str) -> bool:
        return word not in _SORTS and not _ranks(word) and fnmatchcase(partition, word)


def _ranks(word: str) -> tuple[int, ...]:
    """The ranks that a word names: one, the two of a pair, or none."""
    found = _ONE.fullmatch(word) or _PAIR.fullmatch(word)
    return tuple(int(rank) for rank in found.groups()) if found else ()
