"""A search under way, as one line on stderr: on a terminal, and only once it has taken a second."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from . import console

if TYPE_CHECKING:
    from types import TracebackType

    from rich.text import Text

    from assigner.solver import Progress

DELAY_S = 1.0


class SolveProgress:
    """Shows the latest `Progress` of a search while the context is open.

    Args:
        time_limit: Seconds after which the search stops.
    """

    def __init__(self, *, time_limit: float) -> None:
        from rich.live import Live

        self._time_limit = time_limit
        self._latest: Progress | None = None
        self._said = "solving"
        self._start = time.monotonic()
        self._draws_start: float | None = None
        terminal = console.stderr()
        self._live = Live(
            console=terminal, get_renderable=self._line, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._wanted = console.draws_progress(terminal)
        self._timer = threading.Timer(DELAY_S, self._live.start)
        self._timer.daemon = True

    def update(self, progress: Progress) -> None:
        """Take note of where the search stands."""
        self._latest = progress

    def draws(self, done: int, asked: int) -> None:
        """Take note of how many draws of the measurements are solved again; they have the time limit anew."""
        from assigner.report.robustness import draws_text

        now = time.monotonic()
        self._draws_start = self._draws_start or now
        self._latest = None
        self._said = draws_text(done, asked, elapsed_s=now - self._draws_start, time_limit=self._time_limit)

    def _line(self) -> Text:
        from rich.text import Text

        from assigner.report.solution import progress_text

        if self._latest is None:
            return Text(self._said, no_wrap=True, overflow="ellipsis")
        elapsed = time.monotonic() - self._start
        text = progress_text(self._latest, elapsed_s=elapsed, time_limit=self._time_limit)
        return Text(text, no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> Self:
        if self._wanted:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        self._live.stop()
