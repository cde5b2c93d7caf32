"""Who waits for whom when a rank misses another one, which may wait itself, as for one that is stopped.

    rank 2: is stopped
    rank 0: waits for rank 2      time-out: asks ······ blames rank 2, which does not answer
    rank 1: waits for rank 0                   its watching thread answers: it waits for rank 0

gloo closes all of a rank's connections at its first time-out, so that others lose a rank that only waits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import WorkerError
from assigner.launch.seal import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import Store  # type: ignore[attr-defined]

_QUESTION = "assigner/who waits"
_RANK = re.compile(r"worker:(\d+)")

awaited: dict[int, str] = {}
"""By threads (`get_ident`), the worker that one waits for, in words: "worker:1/cpu", or "another worker"; left where it
broke off."""


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


def is_asked(store: Store) -> bool:
    """Whether a rank asks what all do."""
    return bool(store.check([_QUESTION]))


def ask(store: Store) -> None:
    """Have every rank tell what it does, until the run ends."""
    store.set(_QUESTION, "")


def tell(store: Store, rank: int, doing: Doing) -> None:
    """Say what this rank does."""
    store.set(_name(rank), seal(_name(rank), doing))


def told(store: Store, ranks: Iterable[int]) -> dict[int, Doing]:
    """What ranks have told by now."""
    found = {}
    for rank in ranks:
        if store.check([_name(rank)]):
            try:
                found[rank] = unseal(Doing, _name(rank), store.get(_name(rank)))
            except WorkerError:  # a stranger's
                continue
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
        for rank in sorted(_ranks_in(ways.pop(0), ranks) - seen):
            seen.add(rank)
            doing = doings.get(rank)
            if doing is None:
                return rank, None
            if doing.peer:
                ways.append(doing.peer)
            else:
                late.append((rank, doing))
    return late[0] if late else None


def _ranks_in(words: str, ranks: int) -> set[int]:
    named = {int(each) for each in _RANK.findall(words)}
    return named or set(range(ranks))


def _name(rank: int) -> str:
    return f"assigner/does {rank}"
