"""Files as they are read and written: nothing without an end is read, nothing that is read is written over.

What is written is whole from the start: it gets its name when the last byte is on the disk.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_BYTES = 2**30
"""The largest file that is read."""
_GZIP = b"\x1f\x8b"


def read_bytes(path: Path, *, hint: str) -> bytes:
    """What a file holds: a regular one of at most `MOST_BYTES`, since a pipe or a device may have no end.

    Raises:
        UsageError: it is not there, cannot be read (`hint` is the next step then), is no regular file, or is too large.
    """
    try:
        # a pipe that nobody writes to is opened without waiting for somebody
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path} is no regular file", hint="write what it gives to a file, and name that")
            content = b"" if found.st_size > MOST_BYTES else stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint=hint) from error
    except ValueError as error:  # a zero byte, which no path has
        raise UsageError(f"{str(path)!r}: {error}", hint=hint) from error
    if max(found.st_size, len(content)) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES:,} bytes, the most that is read", hint=hint)
    return content


def read_text(path: Path, *, hint: str) -> str:
    """The same as text; a byte order mark at its start is left out.

    Raises:
        UsageError: as `read_bytes`.
        FormatError: it is not UTF-8.
    """
    try:
        return read_bytes(path, hint=hint).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if error.object.startswith(_GZIP):
            raise FormatError(
                f"{path}: compressed by gzip, as timelines for ui.perfetto.dev are",
                hint="no command of assigner reads a timeline; gunzip unpacks a profile, a plan or a trace",
            ) from error
        raise FormatError(f"{path}: not UTF-8 text (byte {error.start})") from error


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document.

    Raises:
        FormatError: it is none, is nested too deeply, or has a number with more digits than are read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise FormatError("not TOML: nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError is one
        raise FormatError(f"not TOML: {str(error).partition(';')[0]}") from error


def refuse_existing(
    path: Path | None, *, force: bool, remedy: str = "--force replaces it", reads: Iterable[Path | None] = ()
) -> None:
    """Raise UsageError if `path` cannot be written, or no file can have such a name: before the work is lost.

    None of the files that a command `reads` is written over, under whichever name; None: there is no such file.
    `remedy` is what helps against an existing file where `force` is not given.
    """
    if path is None:
        return
    refuse_input(path, reads)
    _refuse_name(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="name a file")
    if path.exists() and not path.is_file():  # a file is moved into place: it would replace a device or a pipe
        raise UsageError(f"{path} is no regular file", hint="name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist", hint=f"mkdir -p {path.parent}")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", hint=remedy)
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the folder {path.parent} may not be written to", hint="name a file in another one")


def _refuse_name(path: Path) -> None:
    """Raise UsageError if the system takes no such path: it is too long, say, or has a zero byte."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="name another file") from error
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise UsageError(f"{str(path)!r}: {error}", hint="name another file") from error


def is_regular(path: Path) -> bool:
    """True if there is such a file; False also where no file can have such a name."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than the system takes; a zero byte
        return False


def refuse_input(path: Path, reads: Iterable[Path | None]) -> None:
    """Raise UsageError if `path` is one of the files that a command reads, under whichever name; None: no file."""
    for each in reads:
        if each is not None and is_same_file(path, each):
            also = "" if path == each else f", {each}"
            raise UsageError(f"{path} is a file that this command reads{also}", hint="name another one to write")


def entry_file(entry: str | None) -> Path | None:
    """The Python file of a workload's entry, `FILE.py:FUNCTION`; None: there is none."""
    file, found, _ = (entry or "").rpartition(".py:")
    return Path(f"{file}.py") if found else None


def is_same_file(one: Path, other: Path) -> bool:
    """True if both names lead to one file, by links or as they are."""
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them is not there, or cannot be
        return one.absolute() == other.absolute()


def put(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file: to a temporary name beside `path`, then moved into place.

    Raises:
        UsageError: the file exists and `force` is not given, the folder does not exist, or the disk is full.
    """
    refuse_existing(path, force=force)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:200]}.", dir=path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # before the name leads to it: after a power cut it is whole, or the old one is
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)  # mkstemp makes it private to its owner
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _unwritten(path, error) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unwritten(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror}", hint=room_hint(error, "name a file in another place"))


def room_hint(error: Exception, else_do: str) -> str:
    """The next step after what could not be written: room helps a full disk or quota, and no read-only one.

    An error of a library without numbers of errors may be either.
    """
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, None)
    return f"make room, or {else_do}" if is_full else else_do
