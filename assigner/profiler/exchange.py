"""What the ranks tell each other while they measure: JSON through the job's store, checked on reading.

Whoever waits for others looks again and again: at what they have told, and once a second at whether they still can. So
the wait for a rank that is gone ends within a second, and that for one that is stopped when its heart has not beaten
for a while (`rankprogress.Heartbeat`). What a rank waits in, and for whom, is noted for the watch over the run, which
ends waits elsewhere and answers ranks that ask.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.launch.limitedstore import LimitedStore
from assigner.launch.seal import seal, unseal
from assigner.runtime.messages.sending import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.runtime.failures.failure import FailureWatch

T = TypeVar("T")

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.1
_LOOK_S = 1.0
_MOST_NAMES = 8

OTHERS = "another rank"
"""Whom a rank waits for that waits for all."""


class Exchange:
    """The ranks' common table.

    Args:
        store: The job's store.
        rank: This rank.
        ranks: How many there are.
        timeout_s: A wait for another rank that takes longer fails; so does a call that the store does not answer.

    Attributes:
        at: What this rank is at, in words.
        awaited: Whom it waits for, in words; empty: nobody.
        watch: Is told of both; None: nobody is.
        why_lost: Why a rank will tell nothing any more; empty: it is there.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, timeout_s: float) -> None:
        self.store, self.rank, self.ranks, self.timeout_s = LimitedStore(store), rank, ranks, timeout_s
        self.at, self.awaited = "the start", ""
        self.watch: FailureWatch | None = None
        self.why_lost: Callable[[int], str] = lambda _: ""

    def close(self) -> None:
        """Exchange no more; whoever waits for something is told that the store is silent."""
        self.store.close()

    def begin(self, at: str, awaited: str = "") -> None:
        """From here on this rank is at something, and waits for somebody there; see `at` and `awaited`."""
        self.at, self.awaited = at, awaited
        if self.watch is not None:
            self.watch.busy_since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, at: str) -> Iterator[None]:
        """Be at a wait for others during a block; where that fails, its words stay."""
        before = self.at
        self.begin(at, OTHERS)
        yield
        self.begin(before)

    def to_first(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on rank 0; empty elsewhere.

        Raises:
            LostConnectionError: a rank did not tell its own in time, or is gone; all that are missing are named.
        """
        self.tell(f"{name}/{self.rank}", value)
        if self.rank != 0:
            return []
        self._wait(name)
        return self.told([f"{name}/{rank}" for rank in range(self.ranks)], kind)

    def to_all(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on every rank; errors as of `to_first`."""
        self.tell(f"{name}/{self.rank}", value)
        self._wait(name)
        return self.told([f"{name}/{rank}" for rank in range(self.ranks)], kind)

    def tell(self, name: str, value: Any) -> None:
        """Write a value under a name, for whoever looks."""
        self.store.set(f"assigner/{name}", seal(f"assigner/{name}", value))

    def told(self, names: Sequence[str], kind: type[T]) -> list[T]:
        """What stands under some names, without a wait; nothing before all of it does."""
        keys = [f"assigner/{name}" for name in names]
        found = self.store.multi_get(keys) if keys and self.store.check(keys) else []
        return [unseal(kind, key, each) for key, each in zip(keys, found, strict=False)]

    def check_there(self, ranks: Sequence[int]) -> None:
        """Nothing where some ranks are still there.

        Raises:
            LostConnectionError: one of them will tell nothing any more.
        """
        for rank in ranks:
            if why := self.why_lost(rank):
                raise LostConnectionError(f"worker:{rank}", ConnectionError(why))

    def _wait(self, name: str) -> None:
        """Until every rank has told something under a name."""
        keys = {rank: f"assigner/{name}/{rank}" for rank in range(self.ranks)}
        begun, pause_s, looked = time.monotonic(), _LEAST_PAUSE_S, 0.0
        with self.waiting(f"the exchange of {name}"):
            while not self.store.check([*keys.values()]):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                now = time.monotonic()
                if now - looked < _LOOK_S and now - begun < self.timeout_s:
                    continue
                looked = now
                missing = [rank for rank, key in keys.items() if not self.store.check([key])]
                self.awaited = workers_text(missing) or OTHERS
                self.check_there(missing)
                if missing and now - begun >= self.timeout_s:
                    raise LostConnectionError(
                        self.awaited, TimeoutError(f"timed out: nothing of it for {self.timeout_s:g} s")
                    )


def workers_text(ranks: Sequence[int]) -> str:
    """Ranks as workers, the first few of many."""
    names = [f"worker:{rank}" for rank in ranks[:_MOST_NAMES]]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) + (
        f" ({len(ranks) - _MOST_NAMES} more)" if len(ranks) > _MOST_NAMES else ""
    )
