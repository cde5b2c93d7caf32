"""Why a run ended, said once: its ranks hand the first cause to the launcher that started them, and are silent.

    rank 1: raises in a forward                writes the cause      ends
    rank 0: waits for it, and learns of that   writes the same       ends
    launcher: all ranks have ended             reads, and says it

`assigner run` and `assigner profile` put their process id and a folder in ASSIGNER_CAUSES. It counts for their own
children: what a rank starts in turn, and ranks that something else has started (torchrun, mpirun, srun), speak for
themselves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.errors import AssignerError
from assigner.formats.document import decode, encode
from assigner.launch.seal import clean
from assigner.machine.launchedrank import launched_rank
from assigner.usercode import traced_place

if TYPE_CHECKING:
    from types import TracebackType

VARIABLE = "ASSIGNER_CAUSES"
_JOINED = ".pipeline"  # the ending of a mark's name
LEFT = "ended with exit code 0 while others waited for it"
T = TypeVar("T")
_REPEATED = re.compile(r"worker:\d+\S*: ")  # what one rank has refused, others raise under its name
LEFT_HINT = "every rank joins the run and makes all of its calls; sys.exit, os._exit or its script's end came too soon"


@dataclass(frozen=True)
class FailureReport:
    """Why a rank ended.

    Args:
        worker: Whose error it is.
        message: What went wrong, without the worker.
        exit_code: Of the process that has the error.
        trace: Its traceback; empty: there is none.
        place: Where in the user's code it was raised, where the message does not say it.
        is_own: Written by the process that has the error; others have only heard of it, or noticed that it is gone.
        at: When it was written (`time.time`).
    """

    worker: str
    message: str
    hint: str | None = None
    exit_code: int = 1
    trace: str = ""
    place: str = ""
    is_own: bool = True
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        place, words = f" ({self.place})" if self.place else "", " ".join(self.message.split())
        begin = "" if _REPEATED.match(words) else f"{self.worker}: "
        return clean(f"{begin}{words}{place}")


def place_in(trace: str) -> str:
    """`file.py:12` of a traceback's innermost line in the user's code; empty: none of its lines is."""
    place = traced_place(trace)
    return "" if place is None else f"{Path(place[0]).name}:{place[1]}"


_LONGEST = 100_000
"""Characters of a message or a traceback that others are told: one that prints a tensor has more, and says no more."""


def shortened(text: str) -> str:
    """A text without its middle where it is long."""
    left = len(text) - _LONGEST
    half = _LONGEST // 2
    return text if left <= 0 else f"{text[:half]} ... ({left} characters left out) ... {text[-half:]}"


def words_of(error: BaseException) -> str:
    """What an error says; one whose own `__str__` fails says that."""
    try:
        return shortened(str(error))
    except Exception as why:  # noqa: BLE001 - it is the user's code, and the error before it is what counts
        return f"(no text: its __str__ raised {type(why).__name__})"


def report_of(error: BaseException) -> FailureReport:
    """An error of this process; the message of one of this package's own says it all."""
    rank = launched_rank()
    worker = "a rank" if rank is None else f"worker:{rank}"
    trace = shortened("".join(traceback.format_exception(error)))
    if isinstance(error, AssignerError):
        return FailureReport(worker, error.message, error.hint, error.exit_code, trace)
    return FailureReport(
        worker, f"{type(error).__name__}: {words_of(error)}".removesuffix(": "), trace=trace, place=place_in(trace)
    )


def hand_over(cause: FailureReport) -> bool:
    """Give a cause to the launcher that started this process; its first one counts.

    Returns:
        Whether there is such a launcher: it says the cause, and nobody else needs to.
    """
    folder, name = launcher_folder(), report_name(os.getpid())
    return folder is not None and ((folder / name).exists() or hand_record(name, cause) is not None)


def take_back() -> None:
    """Drop the cause that this process has handed over: its script has caught that error, and is in a run again."""
    folder = launcher_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / report_name(os.getpid())).unlink(missing_ok=True)


def report_name(process: int) -> str:
    """The file in which a process hands over its cause."""
    return f"{process}.json"


def hand_record(name: str, record: Any) -> Path | None:
    """Write a record for the launcher that started this process, whole under its name from the first moment.

    Returns:
        Its file; None: there is no such launcher, or the file cannot be written, as on a full disk.
    """
    folder = launcher_folder()
    if folder is None:
        return None
    with suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(encode(record), file)
        return Path(file.name).rename(folder / name)
    return None


def handed_record(kind: type[T], path: Path) -> T:
    """What stands in a file of `hand_record`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or as a FormatError none of that kind.
    """
    found: T = decode(kind, json.loads(path.read_text(encoding="utf-8")))
    return found


def leave_mark() -> None:
    """Mark for the run's launcher that this process, which a rank may have started in turn, has made a pipeline."""
    folder = os.environ.get(VARIABLE, "").partition(" ")[2]
    if folder and Path(folder).is_dir():
        with suppress(OSError):
            (Path(folder) / f"{os.getpid()}{_JOINED}").touch()


def has_mark(folder: Path) -> bool:
    """Whether a process of the run has left that mark in its launcher's folder."""
    return any(folder.glob(f"*{_JOINED}"))


def listening(folder: Path) -> str:
    """The value of ASSIGNER_CAUSES by which children of this process find it."""
    return f"{os.getpid()} {folder}"


def launcher_folder() -> Path | None:
    """The folder of a launcher that listens, if it has started this process itself."""
    pid, _, folder = os.environ.get(VARIABLE, "").partition(" ")
    return Path(folder) if folder and pid == str(os.getppid()) and Path(folder).is_dir() else None


def first_report(folder: Path) -> FailureReport | None:
    """The cause of a run: the first that a rank has of itself, else the first that one has heard of or noticed."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):  # of a rank that was killed as it wrote
            found.append(handed_record(FailureReport, path))
    return min(found, key=lambda cause: (not cause.is_own, cause.at), default=None)


def tell(error: AssignerError) -> int:
    """Say why this process ends, once for the run: a script's last word.

        except assigner.AssignerError as error:
            sys.exit(assigner.tell(error))

    Returns:
        The exit code of the error.
    """
    if not hand_over(report_of(error)):
        rank = launched_rank()
        begin = "" if rank is None else f"worker:{rank}: "
        lines = [f"{begin}error: {error.message}", *([f"{begin}hint: {error.hint}"] if error.hint else [])]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    return error.exit_code


def hand_over_uncaught() -> None:
    """From here on, an error that nobody catches goes to the launcher instead of to stderr."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = isinstance(error, KeyboardInterrupt) and launcher_folder() is not None  # it says so itself
        if not interrupted and not hand_over(report_of(error)):
            before(kind, error, trace)

    sys.excepthook = hook


def how_it_ended(code: int) -> str:
    """How a process ended, as the second half of a sentence.

    Args:
        code: Its exit code; negative: the number of the signal that killed it.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"was killed by signal {-code}"


def ended_hint(how: str) -> str:
    """What to do about a process that has handed over no error."""
    name = how.rpartition(" ")[2]
    return next((hint for names, hint in _ENDS if name in names), _OUTSIDE if "killed by" in how else _NO_ERROR)


_OUTSIDE = "something outside ended it"
_NO_ERROR = (
    "it handed over no error: its script called sys.exit or os._exit, no program could start, or TMPDIR takes no files;"
    " what it has printed, if anything, is above"
)
_ENDS = (
    (("130",), "it was interrupted: SIGINT, as by Ctrl-C or kill -INT"),
    (("SIGKILL",), f"{_OUTSIDE}: out of memory? (dmesg says so)"),
    (("SIGTERM",), f"{_OUTSIDE}: a scheduler at a limit of its time, or whoever called kill"),
    (("SIGINT", "SIGQUIT"), f"{_OUTSIDE}: a key of its terminal, or whoever called kill"),
    (("SIGHUP",), f"{_OUTSIDE}: its terminal was closed (nohup keeps it), or whoever called kill"),
    (("SIGXCPU", "SIGXFSZ"), "it came to a limit of its host (ulimit -a)"),
    (
        ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"),
        "compiled code that it called has crashed: PYTHONFAULTHANDLER=1 shows where it was called",
    ),
)
"""Signals, and what they mean."""
