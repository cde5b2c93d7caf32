"""A run's store with an end to every call: torch waits for ever where the process that keeps it is stopped.

    this thread     asks ············· 10 s: StoreSilentError     asks: the same at once      asks
    its lane        in the store, which is stopped ······································· an answer

A call is made by a thread of its own, the lane, which may stay in it: the process can go on, and end. A store is opened
in the same way: torch waits for ever for the answer of a program that has the store's port, and is none.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # without `__all__`

from assigner.launch.sockets import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 10.0  # a thread of torch answers, which may get little of a busy processor
STARTING_S = 30.0  # where ranks begin, processors are busy
_SLICE_S = 0.25
_END_S = 10.0

S = TypeVar("S", bound=Store)


class StoreSilentError(DistError):
    """The process that keeps a store is stopped, or its host cut off."""


class _StoreCall:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.done = threading.Event()
        self.found: Any = None
        self.error: Exception | None = None
        self.is_given_up = False


class _StoreLane:
    """Makes calls in their order.

    Attributes:
        is_silent: One was given up, and none has ended since.
        closed: Nobody waits any more.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self.closed = threading.Event()
        self._calls: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="assigner-store", daemon=True)
        self._thread.start()

    def made(self, make: Callable[[], Any], limit_s: float, is_owed: Callable[[], bool] = lambda: True) -> Any:
        """What a call returns, or raise its error; `limit_s` begins anew where `is_owed` says that none is awaited."""
        call = _StoreCall(make)
        self._calls.put(call)
        # in slices: a process that was stopped itself, as by Ctrl-Z, has not waited meanwhile
        most = left = 0 if self.is_silent else math.ceil(limit_s / _SLICE_S)
        while left:
            if call.done.wait(_SLICE_S):
                if call.error is not None:
                    raise call.error
                return call.found
            if self.closed.is_set():
                break
            left = left - 1 if is_owed() else most
        call.is_given_up = self.is_silent = True
        raise StoreSilentError(f"the run's store has not answered for {limit_s:g} s")

    def close(self, within_s: float = _END_S) -> None:
        self.closed.set()
        self._calls.put(None)
        until = time.monotonic() + within_s
        while self._thread.is_alive() and not self.is_silent and time.monotonic() < until:
            self._thread.join(_SLICE_S)  # whoever waits for a call gives it up meanwhile, where there is one

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.is_given_up:
                continue
            try:
                call.found = call.make()
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                call.error = error
            self.is_silent = False
            call.done.set()


class LimitedStore(Store):
    """A store whose calls end in time.

    Args:
        store: The store.
        limit_s: How long a call may take; None: LIMIT_S.
        beside: Another one, over the same connection: both have one lane.
    """

    def __init__(self, store: Store, *, limit_s: float | None = None, beside: LimitedStore | None = None) -> None:
        super().__init__()
        self._store, self._limit_s = store, LIMIT_S if limit_s is None else limit_s
        self._lane: _StoreLane = _StoreLane() if beside is None else beside._lane

    @property
    def is_silent(self) -> bool:
        """A call took too long, and the store has not answered since."""
        return self._lane.is_silent

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._lane.made(lambda: self._store.check(keys), self._limit_s))

    def get(self, key: str) -> bytes:
        """What stands at a key, which is there."""
        found: bytes = self._lane.made(lambda: self._store.get(key), self._limit_s)
        return found

    def set(self, key: str, value: str) -> None:
        """Write at a key."""
        self._lane.made(lambda: self._store.set(key, value), self._limit_s)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write at a key if it holds what is expected; what it holds then."""
        found: bytes = self._lane.made(lambda: self._store.compare_set(key, expected, desired), self._limit_s)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key; what it is then."""
        return int(self._lane.made(lambda: self._store.add(key, amount), self._limit_s))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """What stands at some keys."""
        found: list[bytes] = self._lane.made(lambda: self._store.multi_get(keys), self._limit_s)
        return found

    def close(self) -> None:
        """Make no more calls; whoever waits for one is told that it took too long."""
        self._lane.close()


def opened(make: Callable[[], S], port: int, *, limit_s: float = STARTING_S) -> S:
    """A store, once a program at its port answers as one.

    Args:
        make: Connects to it; it ends by itself where nothing takes the connection.
        port: The store's.
        limit_s: How long one connection may stay without an answer.

    Raises:
        StoreSilentError: it did. (On Linux, where connections can be seen.)
        DistError, OSError: what `make` raises.
    """
    lane, others = _StoreLane(), connected(port)
    seen: set[int] = set()

    def is_owed() -> bool:
        """Whether a connection of the last look is there: one that was refused or ended is made again."""
        nonlocal seen
        before, seen = seen, connected(port) - others
        return bool(before & seen)

    try:
        found: S = lane.made(make, limit_s, is_owed)
    except StoreSilentError as error:
        said = f"it takes connections, and has not answered for {limit_s:g} s as a run's store does"
        raise StoreSilentError(said) from error
    finally:
        lane.close(within_s=0.0)
    return found


@contextmanager
def limited(store: Store, *, limit_s: float | None = None) -> Iterator[LimitedStore]:
    """A store with an end to every call, for a block."""
    found = LimitedStore(store, limit_s=limit_s)
    try:
        yield found
    finally:
        found.close()
