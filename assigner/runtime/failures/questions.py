"""What ranks ask each other through the run's store where none can answer by a message, for it waits for another one.

Its watching thread answers, which looks into the store anyway (`assigner.runtime.failures.failure`); so a comparison,
or a wait, costs nothing more as long as nobody asks. What each has called, when two differ:

    rank 1: differs from what rank 0 told    asks ····· reads the answers, raises, with both sides
    rank 0: goes on, waits for rank 1        its watching thread answers      learns of the error
    rank 2: is late                          comes to the same comparison, and answers then

What each does, when a rank misses another one, which may wait itself, as for one that is stopped:

    rank 2: is stopped
    rank 0: waits for rank 2      time-out: asks ······ blames rank 2, which does not answer
    rank 1: waits for rank 0                   its watching thread answers: it waits for rank 0

gloo closes all of a rank's connections at its first time-out, so that others lose a rank that only waits.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch.distributed import DistError

from assigner.launch.seal import read, write
from assigner.runtime.failures.callrecord import CallRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed import Store  # type: ignore[attr-defined]

_RANK = re.compile(r"worker:(\d+)")
_WAIT_S = 5.0  # twenty looks of a watching thread
_POLL_S = 0.02

T = TypeVar("T")

awaited: dict[int, str] = {}
"""By threads (`get_ident`), the worker that one waits for, in words: "worker:1/cpu", or "another worker"; left where it
broke off."""

Records = tuple[CallRecord, ...]
"""What a rank has called: the last comparisons that it made, or is about to."""


@dataclass(frozen=True)
class Doing:
    """What the main thread of a rank does.

    Args:
        worker: Of that rank.
        at: What it is at; empty: it is in no call of the pipeline.
        peer: The worker that it waits for, in words; empty: none.
        for_s: How long it is in its call, or in none, in seconds.
    """

    worker: str
    at: str
    peer: str
    for_s: float


@dataclass(frozen=True)
class RankQuestion(Generic[T]):
    """What a rank asks of all others.

    Args:
        kind: Of the answers.
        name: Under which it stands in the store.
        place: Under which a rank's answer does, before its number.
    """

    kind: type[T]
    name: str
    place: str

    def ask(self, store: Store, about: str = "") -> None:
        """Have every rank answer, until the run ends."""
        store.set(self.name, about)

    def asked(self, store: Store) -> bytes | None:
        """What a rank asks about; None: nobody has asked."""
        return store.get(self.name) if store.check([self.name]) else None

    def answer(self, store: Store, rank: int, value: T) -> None:
        """Give this rank's answer."""
        write(store, f"{self.place}{rank}", value)

    def answers(self, store: Store, ranks: Iterable[int]) -> Iterator[tuple[int, T]]:
        """What ranks have answered by now."""
        for rank in ranks:
            if (found := read(store, self.kind, f"{self.place}{rank}")) is not None:
                yield rank, found


CALLS = RankQuestion(Records, "assigner/question", "assigner/answer/")
"""What ranks have called when they came to the comparison of a number, which is asked about."""

DOINGS = RankQuestion(Doing, "assigner/who waits", "assigner/does ")
"""What ranks do."""


def asked_about(store: Store) -> int | None:
    """The number of the comparison that a rank has asked about; None: nobody has asked."""
    told = CALLS.asked(store)
    return int(told) if told is not None and told.isdigit() else None  # else a stranger's


def called(store: Store, ranks: Iterable[int], number: int) -> dict[int, Records]:
    """Ask ranks what they have called by the comparison of a number; one that does not answer in time is left out."""
    waiting, found, deadline = set(ranks), dict[int, Records](), time.monotonic() + _WAIT_S
    with suppress(DistError):  # the store is gone: what is known must do
        CALLS.ask(store, str(number))
        while waiting and time.monotonic() < deadline:
            found.update(CALLS.answers(store, sorted(waiting)))
            waiting -= found.keys()
            time.sleep(_POLL_S if waiting else 0.0)
    return found


def awaited_last(peer: str, asker: int, doings: Mapping[int, Doing], ranks: int) -> tuple[int, Doing | None] | None:
    """The rank that others wait for and that waits for none, with what it does; None: they wait in a circle.

    Args:
        peer: Whom a rank misses, in words.
        asker: That rank.
        doings: What the others have told; one that is stopped, gone or cut off tells nothing.
        ranks: How many there are.
    """
    seen, late, ways = {asker}, [], [peer]
    while ways:
        named = {int(each) for each in _RANK.findall(ways.pop(0))}
        for rank in sorted((named or set(range(ranks))) - seen):
            seen.add(rank)
            doing = doings.get(rank)
            if doing is None:
                return rank, None
            if doing.peer:
                ways.append(doing.peer)
            else:
                late.append((rank, doing))
    return late[0] if late else None
