"""Signals as exceptions of a command, which arrive: KeyboardInterrupt for Ctrl-C, SignalledExit for SIGTERM.

What imports a module may take any exception for that of a package that is not there, as torch's C++ code does with
numpy, and go on. So a signal that comes within an import comes again a moment later, until the import has ended. One
that takes long is interrupted, and again if it goes on.

    import torch ························ end
         Ctrl-C   again   again   again      again: KeyboardInterrupt
"""

from __future__ import annotations

import _thread
import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from assigner.launch.stopping import SignalledExit, take_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_AGAIN_S = 0.005  # no time to start much
_IMPORT_S = 5.0  # a user's module may do its work while it is imported
_LATER_S = 1.0  # where that has taken it, the process has ended by then


class _Raising:
    def __init__(self) -> None:
        self._came_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._came_at = now if self._came_at is None else self._came_at
        if _is_importing(frame):
            is_late = now - self._came_at > _IMPORT_S
            # one of `threading` takes locks, which this thread may hold
            _thread.start_new_thread(_send_again, (number, _LATER_S if is_late else _AGAIN_S))
            if not is_late:
                return
        self._came_at = None
        raise KeyboardInterrupt if number == signal.SIGINT else SignalledExit(number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _send_again(number: int, pause_s: float) -> None:
    time.sleep(pause_s)
    os.kill(os.getpid(), number)


@contextmanager
def raised(names: Sequence[str]) -> Iterator[None]:
    """Have signals raise within a block; one that this process ignores (nohup's wish) stays ignored."""
    before: dict[int, Any] = {}
    take_signals([getattr(signal, name) for name in names], _Raising(), before)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that a block starts do not get Ctrl-C, with which a terminal reaches them too: this one ends them.

    It is blocked meanwhile, and comes afterwards; a process inherits that from its first instruction on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
