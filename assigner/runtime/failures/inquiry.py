"""What the other ranks have called, asked for through the run's store when two differ.

A rank that waits for another one cannot answer by a message. Its watching thread can, which looks into the store
anyway (`assigner.runtime.failures.failure`); so a comparison costs nothing more as long as ranks agree.

    rank 1: differs from what rank 0 told    asks ····· reads the answers, raises, with both sides
    rank 0: goes on, waits for rank 1        its watching thread answers      learns of the error
    rank 2: is late                          comes to the same comparison, and answers then
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.distributed import DistError

from assigner.errors import WorkerError
from assigner.launch.seal import seal, unseal
from assigner.runtime.failures.callrecord import CallRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

_QUESTION = "assigner/question"
_WAIT_S = 5.0  # twenty looks of a watching thread
_POLL_S = 0.02


Records = tuple[CallRecord, ...]
"""What a rank has called: the last comparisons that it made, or is about to."""


def asked_about(store: Store) -> int | None:
    """The number of the comparison that a rank has asked about; None: nobody has asked."""
    if not store.check([_QUESTION]):
        return None
    told = store.get(_QUESTION)
    return int(told) if told.isdigit() else None  # else a stranger's


def answer(store: Store, rank: int, records: Iterable[CallRecord]) -> None:
    """Tell what a rank has called."""
    store.set(_name(rank), seal(_name(rank), tuple(records)))


def ask(store: Store, ranks: Iterable[int], number: int) -> dict[int, Records]:
    """What ranks have called when they came to the comparison of a number; one that does not in time is left out."""
    waiting, found, deadline = set(ranks), {}, time.monotonic() + _WAIT_S
    try:
        store.set(_QUESTION, str(number))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if store.check([_name(rank)]):
                    waiting.discard(rank)
                    found[rank] = unseal(Records, _name(rank), store.get(_name(rank)))
            time.sleep(_POLL_S if waiting else 0.0)
    except (DistError, WorkerError):  # the store is gone, or somebody else wrote there: what is known must do
        pass
    return found


def _name(rank: int) -> str:
    return f"assigner/answer/{rank}"
