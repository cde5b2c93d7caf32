"""When a search has to end: the one clock of everything in it that may take long.

A step asks `over` where it can end with what it has. From deep inside of what is of no use unless it is whole, `check`
ends it: whoever began the step goes on with what was known before.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutOfTime(Exception):  # noqa: N818 - no error: the search ends with what it has
    """The time of a search is over."""


class SolveClock:
    """Runs from its making.

    Args:
        limit_s: Seconds until the time is over.
        within: Where that one's time is over, this one's is, too.
    """

    now = staticmethod(time.monotonic)
    """Seconds since some moment."""

    def __init__(self, limit_s: float = math.inf, *, within: SolveClock | None = None) -> None:
        self._limit_s, self._within, self._start = limit_s, within, self.now()
        self._kept_s, self._stop_s = 0.0, math.inf

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return self.now() - self._start

    @property
    def left_s(self) -> float:
        """Seconds until the time is over."""
        left_s = min(self._limit_s - self._kept_s, self._stop_s) - self.elapsed_s
        return left_s if self._within is None else min(left_s, self._within.left_s)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left_s <= 0

    def check(self) -> None:
        """Raise OutOfTime once the time is over."""
        if self.over:
            raise OutOfTime

    def stop_within(self, seconds: float) -> None:
        """Bring the end forward: no more than so many seconds from now."""
        self._stop_s = min(self._stop_s, self.elapsed_s + seconds)

    @contextmanager
    def keeping(self, share: float) -> Iterator[None]:
        """What is done within has to end earlier: this share of the seconds that are left is kept for what follows."""
        self._kept_s = share * self.left_s if math.isfinite(self.left_s) else 0.0
        try:
            yield
        finally:
            self._kept_s = 0.0
