"""The user's own code: how it is named, and its errors, told with their line there, not as a bug of this program."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.errors import AssignerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

UNKNOWN = "an unknown line"
"""What is said where no frame lies in the user's code."""

_HEAD = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'^ {2}File "(.+)", line (\d+), in .+(?:\n|\Z)(?: {4}.*\n| {2}\[Previous line.*\n)*', re.MULTILINE)
_LINKS = re.compile(r"(\n(?:The above exception was the direct|During handling of the above).*\n\n)")
_MOST_FRAMES = 20
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def user_place(places: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
    """The innermost place in the user's code: no file of Python, of this package, of an installed one or its script.

    The places are file and line of each frame, the innermost last. Where nothing of the user's own is among them, it is
    the innermost one in another package than torch and this one; None: there is neither.
    """
    others = [place for place in places if not _is_machinery(place[0])]
    own = [place for place in others if not _INSTALLED.search(place[0])]
    return next(reversed(own or others), None)


def traced_place(trace: str) -> tuple[str, int] | None:
    """The same of the frames that a traceback's text has."""
    return user_place([(frame[1], int(frame[2])) for frame in _FRAME.finditer(trace)])


def calling_place() -> tuple[str, int] | None:
    """The place in the user's code, as `user_place` finds it, that is running: in microseconds, no source is read."""
    other: tuple[str, int] | None = None
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        file = at.f_code.co_filename
        if not _is_machinery(file):
            if not _INSTALLED.search(file):
                return file, at.f_lineno
            other = other or (file, at.f_lineno)
        at = at.f_back
    return other


def is_own_call() -> bool:
    """Whether this package calls what is in the file that asks, by itself or through torch and Python's library."""
    at: FrameType | None = sys._getframe(1)
    asking = at.f_code.co_filename if at is not None else ""
    while at is not None and ((file := at.f_code.co_filename) == asking or _is_machinery(file)):
        if file != asking and file.startswith(_own_folders()):
            return True
        if file.startswith("<") and at.f_globals.get("__name__") == "__main__":  # typed in
            return False
        at = at.f_back
    return False


def is_asked_by_user() -> bool:
    """Whether the code that asks the caller, if no other function of the caller's file does, is not torch's or ours."""
    asked = sys._getframe(1).f_code.co_filename
    at: FrameType | None = sys._getframe(2)
    while at is not None and at.f_code.co_filename == asked:
        at = at.f_back
    name = "" if at is None else str(at.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in ("torch", "assigner")


@cache
def _is_machinery(file: str) -> bool:
    return file.startswith(("<", *_machinery())) or _is_console_script(Path(file))


def _is_console_script(file: Path) -> bool:
    """Whether it is an installed package's, as `bin/assigner`; a link may lead to it."""
    import sysconfig

    return not file.suffix and file.resolve().parent == Path(sysconfig.get_path("scripts")).resolve()


@cache
def _own_folders() -> tuple[str, ...]:
    return f"{Path(__file__).resolve().parent}/", f"{Path(__file__).parent}/"


@cache
def _machinery() -> tuple[str, ...]:
    """Where this package, its command line, torch and the standard library lie; no packages are below the last."""
    import importlib.util
    import sysconfig

    library = Path(sysconfig.get_path("stdlib"))
    specs = [importlib.util.find_spec(name) for name in ("torch", "assigner_cli")]  # found, not imported
    found = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    below = [each for each in library.iterdir() if each.name not in ("site-packages", "dist-packages")]
    return (
        *_own_folders(),
        *(f"{folder}/" for folder in found),
        *(f"{each}/" if each.is_dir() else str(each) for each in below),
    )


def user_trace(trace: str) -> str:
    """A traceback with the user's frames alone, where it was raised in code of the user's.

    It has the errors of a traceback, as `traceback.format_exception` gives it with the causes, that come from the
    user's code; empty: none does, as where this program refuses something.
    """
    parts = _LINKS.split(trace)
    found = [(users, link) for part, link in zip(parts[::2], [*parts[1::2], ""], strict=True)
             if (users := _user_frames(part))]  # fmt: skip
    return "".join(f"{users}{link if n < len(found) - 1 else ''}" for n, (users, link) in enumerate(found))


def _user_frames(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    since = max((n + 1 for n, frame in enumerate(frames) if frame[1].startswith(_own_folders())), default=0)
    places = [(frame[1], int(frame[2])) for frame in frames]
    said = trace[frames[-1].end() :] if frames else ""
    if said.startswith("assigner.") or user_place(places[since:]) is None:
        return ""
    own = [frame[0] for frame, place in zip(frames, places, strict=True) if user_place([place]) is not None]
    if len(own) > _MOST_FRAMES:
        own[_MOST_FRAMES // 2 : -_MOST_FRAMES // 2] = [f"  ... {len(own) - _MOST_FRAMES} more\n"]
    return f"{_HEAD}{''.join(own)}{said}"


def running_line() -> str:
    """`FILE:LINE (code)` of the user's code that this package runs: of a library's, where the model is one's.

    The frames lie between two of this package's: it has called the code, and stands where the code calls torch. What is
    further out has called this package, and counts only where it is itself such code, as a forward between partitions.
    """
    frames = [(frame.filename, frame.lineno or 0, frame.line or "") for frame in traceback.extract_stack()[:-1]]
    ours = [n for n, (file, _, _) in enumerate(frames) if file.startswith(_own_folders())]
    runs = (_told(frames[since:until]) for since, until in reversed(list(itertools.pairwise(ours))))
    return next(filter(None, runs), UNKNOWN)


def user_line(error: BaseException) -> str:
    """`FILE:LINE (code)` of the innermost frame of an error that lies in the user's code."""
    return _line(error) or UNKNOWN


def _line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:  # of the file that is read; the frames are the importer's
        return f"{error.filename}:{error.lineno} ({(error.text or '').strip()})"
    frames = traceback.extract_tb(error.__traceback__)
    return _told([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def _told(frames: Sequence[tuple[str, int, str]]) -> str:
    place = user_place([(file, line) for file, line, _ in frames])
    code = next((code for file, line, code in reversed(frames) if (file, line) == place), "")
    return "" if place is None else f"{place[0]}:{place[1]} ({code})"


@contextlib.contextmanager
def user_code(what: str, *, hint: str = "-v shows the whole traceback") -> Iterator[None]:
    """Run the user's code; what it raises becomes a UsageError with the line in it.

    Raises:
        UsageError: the code raised anything but an error of this package: "`what` failed".
    """
    try:
        yield
    except AssignerError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a workload would end the command as if all were done
        said = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
        where = f" at {line}" if (line := _line(error)) else ""
        failure = UsageError(f"{what} failed{where}: {message}", hint=hint)
        failure.trace = "".join(traceback.format_exception(error))
        raise failure from error


def parse_call(call: str, entry: str, *, what: str, hint: str) -> tuple[str, dict[str, Any]]:
    """The name and the keywords of `name` or `name(width=64)`, whose values are plain literals.

    Raises:
        UsageError: it has another form; `entry` is what it is part of, and `what` what it should name.
    """
    try:
        node = ast.parse(call.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:  # {[]: 1}; nested too deeply
        raise UsageError(f"{entry!r}: {call!r} cannot be read", hint=hint) from error
    raise UsageError(f"{entry!r}: {call!r} is no {what}", hint=hint)
