"""Signals as an exception, once, and not while things are put away.

The first of SIGINT, SIGTERM and SIGHUP ends what is going on with `Interrupted`. From then on, and after `hold`,
signals are only noted; when the block ends, the noted one has the effect that it would have had without us. Where that
effect is a handler that returns, `Interrupted` goes on: the block did not do its work.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal ended the block; it goes through `except Exception` as KeyboardInterrupt does."""


class Interruption:
    """A block in which a signal is an exception. Outside the main thread, which alone gets signals, it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
        self._noted: int | None = None
        self._held = False

    def hold(self) -> None:
        """From here on a signal is noted and interrupts nothing."""
        self._held = True

    def _note(self, number: int, _: FrameType | None) -> None:
        first, self._noted = self._noted is None, self._noted or number
        if first and not self._held:
            raise Interrupted

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                # nohup's wish is respected, and a handler that was not set from Python could not be put back
                if before is not None and before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._noted is not None:
            os.kill(os.getpid(), self._noted)
