"""Signals as an exception, once, and not while things are put away.

The first of SIGINT, SIGTERM and SIGHUP ends what is going on with `Interrupted`. From then on, and after `hold`,
signals are only noted; when the block ends, the noted one has the effect that it would have had without us. Where that
effect is a handler that returns, `Interrupted` goes on: the block did not do its work.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from assigner.launch.stopping import take_signals

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal ended the block; it goes through `except Exception` as KeyboardInterrupt does."""


class Interruption:
    """A block in which a signal is an exception. Outside the main thread, which alone gets signals, it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
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
        take_signals(_SIGNALS, self._note, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._noted is not None:
            os.kill(os.getpid(), self._noted)
