"""A request to stop: signals that a rank notes instead of ending by them, and that its launcher passes on.

    Ctrl-C, kill, Slurm's warning      rank                                   assigner run
    a first one                        noted: the script asks, and ends       passed on to the ranks that note it; then
                                       its training in order                  it waits for them, for a time with an end
    the same again within 2 s          the same request: a terminal sends     nothing
                                       it to all, and a launcher again
    the same again later               ends the process, as usual             ends the ranks, as usual

A rank tells its launcher in the folder of ASSIGNER_CAUSES (failurereport.py) that it notes signals. Of a script that
does not ask, nothing is noted and nothing passed on.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from assigner.errors import UsageError
from assigner.formats.document import Range
from assigner.launch.failurereport import hand_record, handed_record, launcher_folder
from assigner.machine.launchedrank import launched_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Ctrl-C; what `kill`, Slurm and torchrun send at the end; what schedulers are asked to send before it."""

GRACE_S = 600.0
_SAME_S = 2.0
_FILE = "stop"  # the ending of a file's name


class SignalledExit(SystemExit):
    """A signal has ended a launcher and its ranks; the code is the one by which a shell tells of a killed process."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = _name(number)


@dataclass(frozen=True)
class NotedSignals:
    """What a rank tells its launcher.

    Args:
        signals: Numbers of those that it notes.
        grace_s: How long it may take to end after one, in seconds.
    """

    signals: tuple[int, ...]
    grace_s: Annotated[float, Range(0)]


def take_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None], before: dict[int, Any]
) -> None:
    """Have signals call a handler; outside the main thread, which alone gets signals, nothing is done.

    Args:
        numbers: Of the signals; one that this process ignores (nohup's wish) stays ignored, and one that was not set
            from Python, which could not be put back, stays as it is.
        handler: What they call.
        before: Gets what each of them called before.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in numbers:
        if (called := signal.getsignal(number)) not in (signal.SIG_IGN, None):
            before[number] = called
            signal.signal(number, handler)


class StopSignals:
    """The signals that ask this process to stop.

    Attributes:
        requested: One has come.

    Raises:
        UsageError: there is no such signal, or none that can be noted.
    """

    def __init__(self, names: Iterable[str], grace_s: float) -> None:
        self.names, self.grace_s = tuple(names), grace_s
        self._numbers = [_number(name) for name in self.names]
        if not 0 < grace_s < math.inf:
            raise UsageError(f"grace_s={grace_s}: expected a finite number of seconds above 0")
        self.requested = self._closed = False
        self._process = os.getpid()
        self._came: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._file: Path | None = None

    def install(self) -> None:
        """Note them from now on; those that this process ignores stay ignored.

        Raises:
            UsageError: this is not the main thread, the only one in which Python lets signals be taken.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be noted in the main thread alone", hint="ask there first, then anywhere")
        take_signals(self._numbers, self._note, self._before)
        for number in self._before:
            signal.siginterrupt(number, False)  # a message that is on its way in C goes on
        if self._before:
            told = NotedSignals(tuple(sorted(self._before)), self.grace_s)
            self._file = hand_record(f"{self._process}.{id(self)}.{_FILE}", told)

    def close(self) -> None:
        """Have the signals do what they did before; in a rank, not before the same request can have come again.

        Where others have been put in front of these since, as another pipeline's, they do so behind those.
        """
        if self._came and launched_rank() is not None:
            time.sleep(max(0.0, max(self._came.values()) + _SAME_S - time.monotonic()))
        self._put_back()

    def _put_back(self) -> None:
        if self._file is not None and not self.requested:  # else its launcher knows why this process ends
            self._file.unlink(missing_ok=True)
            self._file = None
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number in tuple(self._before):
                if signal.getsignal(number) == self._note:  # else somebody has put another one in its place since
                    signal.signal(number, self._behind(number))
                    del self._before[number]

    def _behind(self, number: int) -> Any:
        """What a signal did before, but for what has been closed meanwhile."""
        before = self._before.get(number, signal.SIG_DFL)
        owner = getattr(before, "__self__", None)
        return owner._behind(number) if isinstance(owner, StopSignals) and owner._closed else before

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._behind(number)
        if os.getpid() != self._process:  # a fork, as a DataLoader's worker: a terminal reaches it, too
            if number != signal.SIGINT:
                signal.signal(number, before)
                os.kill(os.getpid(), number)
            return
        if self._closed:  # in another thread, or something in front of it goes on calling it
            if callable(before):
                before(number, frame)
            elif before is signal.SIG_DFL or signal.getsignal(number) == self._note:
                signal.signal(number, before)
                os.kill(self._process, number)
            return
        now, first = time.monotonic(), number not in self._came
        if not first and now - self._came[number] > _SAME_S:
            self._put_back()
            os.kill(self._process, number)
            return
        self._came.setdefault(number, now)
        if first and not self.requested and launcher_folder() is None:  # else that one says so
            rank = launched_rank()
            name = "" if rank is None else f"[worker:{rank}] "
            with suppress(OSError):  # stderr is closed
                os.write(2, f"{name}{_name(number)}: training is asked to stop; once more ends it at once\n".encode())
        self.requested = True
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


class SignalPassing:
    """Passes on to a launcher's ranks what asks them to stop.

    Args:
        folder: Where ranks tell what they note.
        is_running: Whether a process that was started here has not ended.
        is_failing: The run has failed elsewhere, and what comes now is its end.
        notice: Says a line.

    Attributes:
        grace_s: How long the ranks may take to end, once they have been passed a signal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_running: Callable[[int], bool],
        is_failing: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None:
        self._folder, self._is_running, self._is_failing, self._notice = folder, is_running, is_failing, notice
        self._came: dict[int, float] = {}
        self._until = float("inf")
        self._before: dict[int, Any] = {}
        self.grace_s = 0.0

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Handlers that the block installs, by `begin` or as torch's agent does, are those of before behind it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        try:
            yield
        finally:
            for number, before in handlers.items():
                if before is not None and signal.getsignal(number) != before:
                    signal.signal(number, before)
            self._before.clear()

    def begin(self) -> None:
        """Take the signals from now on, in front of what takes them already."""
        take_signals(map(_number, SIGNALS), self._take, self._before)

    @property
    def overdue(self) -> signal.Signals | None:
        """The signal after which the ranks should have ended by now; None: there is none."""
        return signal.Signals(next(reversed(self._came))) if time.monotonic() > self._until else None

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._came.get(number, now) > _SAME_S or self._is_failing() or not (ranks := self._noting(number)):
            self._as_before(number, frame)
            return
        if number in self._came:
            return
        self._came[number] = now
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        if self._until == float("inf"):
            self.grace_s = max(each.grace_s for each in ranks.values())
            self._until = now + self.grace_s
            self._notice(
                f"{_name(number)}: the ranks are asked to stop, and have {self.grace_s:g} s to end; once more ends them"
            )

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    def _noting(self, number: int) -> dict[int, NotedSignals]:
        """The ranks that note a signal, by their process ids."""
        found = {}
        for path in self._folder.glob(f"*.{_FILE}"):
            with suppress(OSError, ValueError):  # of a rank that is just ending
                told = handed_record(NotedSignals, path)
                process = int(path.name.partition(".")[0])
                if number in told.signals and self._is_running(process):
                    found[process] = told
        return found


def _number(name: str) -> int:
    found = getattr(signal, name, None) if isinstance(name, str) and name.startswith("SIG") else None
    if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"{name!r} is no signal that can be noted", hint=f"as {', '.join(SIGNALS)}")
    return found


def _name(number: int) -> str:
    return signal.Signals(number).name
