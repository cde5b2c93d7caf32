"""Measurements under way: what is being measured, the share done, and the time left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from . import console

if TYPE_CHECKING:
    from types import TracebackType


class MeasuringProgress:
    """A bar on stderr while the context is open; silent where stderr is no terminal, or when quiet.

    Args:
        wanted: False on the ranks that do not report.
    """

    def __init__(self, *, wanted: bool) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        terminal = console.stderr()
        self._shown = wanted and terminal.is_terminal and not console.settings().quiet
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
            console=terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("profile", total=1.0)

    def update(self, what: str, share: float) -> None:
        """Take note of what is measured now, and of the share that is done, 0 to 1."""
        if self._shown:
            self._bar.update(self._task, description=what, completed=share)

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()
