"""The two consoles, made in one place: results go to stdout, everything else to stderr.

A terminal has its own width. A pipe has none, and tables are as wide as they need to be there; COLUMNS, where it is
set, is the width of both.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from assigner.formats.document import UnknownFieldWarning
from assigner.formatting import LONGEST, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console

    from assigner.report.sheet import Part

UNLIMITED = 10_000
"""Columns of a pipe."""

_PLAIN = {"█": "#", "▌": "-", "░": ".", "·": "|", "±": "~", "×": "x", "µ": "u", "─": "-", "│": "|", "…": "~"}


@dataclass(frozen=True)
class Settings:
    """What the global flags say."""

    quiet: bool = False
    verbose: bool = False


_current = [Settings()]


def configure(settings: Settings) -> None:
    """Make `settings` those of this process."""
    _current[0] = settings


def settings() -> Settings:
    """The global flags in effect."""
    return _current[0]


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Stand-ins of the same width for what the stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("assigner.plain", _plain)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="assigner.plain")
    width, height = _size(stream)
    return Console(file=stream, width=width, height=height, highlight=False, markup=False, emoji=False)


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines: both are set, since rich falls back to 80 columns on pipes and on dumb terminals."""
    columns = os.environ.get("COLUMNS", "")
    with suppress(OSError, ValueError):  # neither a terminal nor a file
        found = os.get_terminal_size(stream.fileno())
        return int(columns) if columns.isdecimal() and int(columns) else found.columns or 80, found.lines or 25
    return int(columns) if columns.isdecimal() and int(columns) else UNLIMITED, 25


def stdout() -> Console:
    """The console of results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console of everything else."""
    return _console(sys.stderr)


def draws_progress(terminal: Console) -> bool:
    """Whether somebody watches: a terminal that can redraw a line, and no -q. FORCE_COLOR makes a pipe no terminal."""
    forced = bool(os.environ.get("FORCE_COLOR")) and not terminal.file.isatty()
    return terminal.is_terminal and not terminal.is_dumb_terminal and not forced and not settings().quiet


@contextmanager
def under_way(doing: str) -> Iterator[None]:
    """The user's model runs in the block for a look: its warnings are nobody's, and a terminal says what goes on."""
    terminal = stderr()
    watched = terminal.status(doing, spinner="line") if draws_progress(terminal) else nullcontext()
    with watched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def warnings_told() -> Iterator[None]:
    """Within the block a line tells what a file has that is no field of its format, once; others are as ever."""
    told = set[str]()
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, UnknownFieldWarning):
                before(message, category, *place, **more)
            elif str(message) not in told:
                told.add(str(message))
                notice(f"warning: {message}")

        warnings.showwarning = show
        yield


def show(report: Iterable[Part]) -> None:
    """Print a report as a result."""
    from assigner.report.sheet import draw

    console = stdout()
    console.print(draw(report, width=console.width), crop=False)


def show_json(data: Any) -> None:
    """Print one JSON object as the result; a number that JSON cannot hold becomes null."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quieten_torch() -> None:
    """Have torch, which is not imported yet, keep to itself what is told in a line here.

    It adds a page to a lost store, and its memory profiler warns of every block that is older than a measurement.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def prints_aside() -> AbstractContextManager[object]:
    """A block of the user's code: what it prints is no result, and goes to stderr."""
    return redirect_stdout(sys.stderr)


def show_text(text: str) -> None:
    """Print a text as it is as the result."""
    sys.stdout.write(text)


def notice(text: str) -> None:
    """Say something beside the result, unless quiet."""
    if not settings().quiet:
        stderr().print(printable(text, most=LONGEST), soft_wrap=True)


def explain(report: Iterable[Part]) -> None:
    """Print a report below an error, unless quiet."""
    from assigner.report.sheet import draw

    parts = tuple(report)
    if parts and not settings().quiet:
        console = stderr()
        console.print()
        console.print(draw(parts, width=console.width), crop=False)


def fail(message: str, hint: str | None) -> None:
    """Print an error: what is wrong, and the next step on a line of its own."""
    from rich.text import Text

    console = stderr()
    for name, style, text in (("error: ", "bold red", message), ("hint: ", "bold", hint)):
        if text:
            told = printable(" ".join(text.split()), most=LONGEST)
            console.print(Text.assemble((name, style), told), soft_wrap=True)
