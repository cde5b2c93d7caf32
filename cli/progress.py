"""Searches and measurements under way, as one line on stderr, where that is a terminal and somebody watches.

On a pipe a search is silent, and a measurement, which takes minutes, says what it begins, and twice a minute how far
it is.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from assigner import formatting as fmt

from . import console

if TYPE_CHECKING:
    from rich.text import Text

    from assigner.profiler.rankprogress import RankProgress
    from assigner.solver import Progress

DELAY_S = 1.0
_DRAW_S, _SAY_S = 0.25, 30.0
_KINDS = {
    "": "tracing the model",
    **dict.fromkeys(("walk", "point", "update"), "measuring partitions"),
    "links": "measuring links",
    "all-reduces": "measuring all-reduces",
}
"""What a pipe is told of a kind of work; of others nothing."""
_BAR, _FIGURES = 20, len(" 100% 1 h 20 min left ")


class SolveProgress:
    """Shows the latest `Progress` of a search while the context is open, once it has taken a second."""

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

        said, elapsed = self._said, time.monotonic() - self._start
        if self._latest is not None:
            said = progress_text(self._latest, elapsed_s=elapsed, time_limit=self._time_limit)
        return Text(said, no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> Self:
        if self._wanted:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        self._live.stop()


class MeasuringProgress:
    """A bar while the context is open: the worker that will take longest, the share done and the time left.

    It is drawn between measurements alone: a thread that draws would take time from what is being measured. Where none
    can be drawn, as on a pipe, each kind of work is said in a line when it begins, and twice a minute how far it is.
    Ranks that do not report do not want it.
    """

    def __init__(self, *, wanted: bool, workers: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        terminal = console.stderr()
        self._wanted, self._shown = wanted, wanted and console.draws_progress(terminal)
        self._on, self._said = f"on {fmt.plural(workers, 'worker')}", set[str]()
        self._room = max(terminal.width - _BAR - _FIGURES, 8)
        self._bar = Progress(
            BarColumn(bar_width=_BAR), TaskProgressColumn(), TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"), console=terminal, transient=True, auto_refresh=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0, left="")
        self._shown_at = 0.0

    def update(self, progress: RankProgress) -> None:
        """Take note of where the run stands."""
        if self._wanted and not self._shown:
            self._say(progress)
        if self._shown and time.monotonic() - self._shown_at > _DRAW_S:
            self._shown_at = time.monotonic()
            what = f"{progress.worker}: {progress.what}"
            what = what if len(what) <= self._room else f"{what[: self._room - 1]}…"  # one line on a narrow terminal
            self._bar.update(self._task, description=what, completed=progress.share, left=left_text(progress.left_s))
            self._bar.refresh()

    def _say(self, progress: RankProgress) -> None:
        """A line, where it is time for one."""
        said, now = _KINDS.get(progress.kind), time.monotonic()
        if said is None or (said in self._said and now - self._shown_at < _SAY_S):
            return
        left = left_text(progress.left_s)
        far = f": {100 * progress.share:.0f} %{', ' if left else ''}{left}" if said in self._said else ""
        self._said.add(said)
        self._shown_at = now
        console.notice(f"{said} {self._on}{far}")

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
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
