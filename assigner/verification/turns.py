"""Several workers' code in one process: a thread for each, of which one runs at a time.

What a rank does in a run blocks in the middle of it, where it waits for a message. Here such a wait ends the thread's
turn, and the next thread whose message is there goes on. The order is the same each time, and nothing runs at once:

    worker 0    forward, send ...........................  receive, backward
    worker 1    ................ receive, forward, backward, send
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class _StoppedError(BaseException):
    """Ends a thread whose companions have failed; no user code catches it."""


class _Turn(Generic[T]):
    """One thread and what it waits for.

    Args:
        body: What it runs.
    """

    def __init__(self, body: Callable[[], T]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.done = self.stopped = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._mine, self._given_back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], T]) -> None:
        try:
            self._mine.acquire()
            if not self.stopped:
                self.result = body()
        except _StoppedError:
            self.result = None
        except BaseException as error:  # noqa: BLE001 - it is raised again where the turns are given
            self.error = error
        finally:
            self.done = True
            self._given_back.release()

    def give(self) -> None:
        """Let the thread run until it waits or ends."""
        self._mine.release()
        self._given_back.acquire()

    def wait(self, ready: Callable[[], bool]) -> None:
        """In the thread: end the turn until `ready` says yes."""
        self.ready = ready
        self._given_back.release()
        self._mine.acquire()
        if self.stopped:
            raise _StoppedError

    def stop(self) -> None:
        """End the thread, wherever it waits."""
        self.stopped = True
        self._mine.release()
        self._thread.join()


class Turns:
    """Runs the bodies of several workers, one at a time."""

    def __init__(self) -> None:
        self._current: _Turn[object] | None = None

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Called by a body: the others run until `ready` says yes."""
        if not ready():
            assert self._current is not None
            self._current.wait(ready)

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run all of them to their ends.

        Returns:
            What each of them returned.

        Raises:
            RuntimeError: each one that is left waits for something that nobody will do.
            BaseException: what one of them raised; the others are stopped.
        """
        turns = [_Turn(body) for body in bodies]
        try:
            while waiting := [turn for turn in turns if not turn.done]:
                able = [turn for turn in waiting if turn.ready()]
                if not able:
                    raise RuntimeError("every worker waits for a message that no other one sends")
                for turn in able:
                    self._current = turn  # type: ignore[assignment]
                    turn.give()
                    if turn.error is not None:
                        raise turn.error
        finally:
            self._current = None
            for turn in turns:
                turn.stop()
        return [turn.result for turn in turns]  # type: ignore[misc]
