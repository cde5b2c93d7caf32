"""Measurements under way: the worker that will take longest, what it measures, the share done and the time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from . import console

if TYPE_CHECKING:
    from types import TracebackType

    from assigner.profiler.rankprogress import RankProgress

_DRAW_S = 0.25
_BAR, _FIGURES = 20, len(" 100% 1 h 20 min left ")


class MeasuringProgress:
    """A bar on stderr while the context is open; silent where stderr is no terminal, or when quiet.

    It is drawn between measurements alone: a thread that draws would take time from what is being measured.

    Args:
        wanted: False on the ranks that do not report.
    """

    def __init__(self, *, wanted: bool) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        terminal = console.stderr()
        self._shown = wanted and console.draws_progress(terminal)
        self._room = max(terminal.width - _BAR - _FIGURES, 8)
        self._bar = Progress(
            BarColumn(bar_width=_BAR), TaskProgressColumn(), TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"), console=terminal, transient=True, auto_refresh=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0, left="")
        self._drawn = 0.0

    def update(self, standing: RankProgress) -> None:
        """Take note of where the run stands."""
        if self._shown and time.monotonic() - self._drawn > _DRAW_S:
            self._drawn = time.monotonic()
            what = f"{standing.worker}: {standing.what}"
            what = what if len(what) <= self._room else f"{what[: self._room - 1]}…"  # one line on a narrow terminal
            self._bar.update(self._task, description=what, completed=standing.share, left=left_text(standing.left_s))
            self._bar.refresh()

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()


def left_text(seconds: float | None) -> str:
    """Time left, no finer than it is known: `12 s left`, `3 min left`, `1 h 20 min left`; nothing where it is not."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min left"
