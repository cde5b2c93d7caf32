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
from concurrent.futures import Future, wait
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


class _StoreLane:
    """Makes calls in their order.

    Attributes:
        is_silent: One was given up, and none has ended since.
        closed: Nobody waits any more.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self.closed = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="assigner-store", daemon=True)
        self._thread.start()

    def made(self, make: Callable[[], Any], limit_s: float, is_owed: Callable[[], bool] = lambda: True) -> Any:
        """What a call returns, or raise its error; `limit_s` begins anew where `is_owed` says that none is awaited."""
        found = Future[Any]()
        self._calls.put((found, make))
        # in slices: a process that was stopped itself, as by Ctrl-Z, has not waited meanwhile
        most = left = 0 if self.is_silent else math.ceil(limit_s / _SLICE_S)
        while left:
            if wait([found], _SLICE_S).done:
                return found.result()
            if self.closed.is_set():
                break
            left = left - 1 if is_owed() else most
        found.cancel()
        self.is_silent = True
        raise StoreSilentError(f"the run's store has not answered for {limit_s:g} s")

    def close(self, within_s: float = _END_S) -> None:
        self.closed.set()
        self._calls.put(None)
        until = time.monotonic() + within_s
        while self._thread.is_alive() and not self.is_silent and time.monotonic() < until:
            self._thread.join(_SLICE_S)  # whoever waits for a call gives it up meanwhile, where there is one

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            found, make = call
            if not found.set_running_or_notify_cancel():
                continue  # it was given up
            try:
                made = make()
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                self.is_silent = False  # before whoever waits goes on, and asks for it
                found.set_exception(error)
            else:
                self.is_silent = False
                found.set_result(made)


def _in_time(name: str) -> Callable[..., Any]:
    """A store's method of that name, called by the lane."""

    def call(self: LimitedStore, *given: Any) -> Any:
        return self._lane.made(lambda: getattr(self._store, name)(*given), self._limit_s)

    return call


class LimitedStore(Store):
    """A store whose calls end in time.

    Args:
        limit_s: How long a call may take; None: LIMIT_S.
        beside: Another one, over the same connection: both have one lane.
    """

    def __init__(self, store: Store, *, limit_s: float | None = None, beside: LimitedStore | None = None) -> None:
        super().__init__()
        self._store, self._limit_s = store, LIMIT_S if limit_s is None else limit_s
        self._lane: _StoreLane = _StoreLane() if beside is None else beside._lane

    check, get, set = _in_time("check"), _in_time("get"), _in_time("set")
    compare_set, add, multi_get = _in_time("compare_set"), _in_time("add"), _in_time("multi_get")

    @property
    def is_silent(self) -> bool:
        """A call took too long, and the store has not answered since."""
        return self._lane.is_silent

    def close(self) -> None:
        """Make no more calls; whoever waits for one is told that it took too long."""
        self._lane.close()


def any_there(*places: tuple[LimitedStore, str]) -> bool:
    """Whether one of some stores, which have one lane, has its key: the lane is asked once, and not for each.

    Raises:
        DistError: as calls of the first one.
    """
    first = places[0][0]
    found: bool = first._lane.made(lambda: any(each._store.check([key]) for each, key in places), first._limit_s)
    return found


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
