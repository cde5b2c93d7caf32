"""A folder that takes a name at once: who looks finds the whole of the old one or the whole of the new one.

    .at.NUMBER.part     the new one, written and flushed to the disk; the number is this save's own
    at                  the old one    both names are exchanged by one call of Linux; then the old one is removed

A file system that cannot exchange names (NFS) takes two renames, and a process that is killed between them leaves
`.at.NUMBER.before`, the old one, and `.at.NUMBER.part`, the new one. One file is the seal of a folder: it is written
last and removed first, so a folder that has it is whole.

Two runs may save to one name. A lock on the file `.at.saving` keeps the second one out, and the kernel drops it with
the process. Where a file system has no locks, each still writes to a folder of its own, and removes that alone. What
is removed is given another name before: an exchange is of a whole folder, or it fails.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from assigner.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)
_LOCKED = (errno.EAGAIN, errno.EACCES)

FACTS = "training.json"
"""The file of a checkpoint that is written last, and removed first: a folder that has it is whole."""


def part_of(folder: Path, number: str) -> Path:
    """Where the folder of a name is written, beside it, by the save of a number: eight hexadecimal digits."""
    return folder.with_name(f".{folder.name}.{number}.part")


def leftovers(folder: Path) -> list[Path]:
    """What saves to this name that were broken off have left, or are writing now; the newest first."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.([0-9a-f]{{8}}\.)?(part|before|gone)")
    try:
        found = [path for path in folder.parent.iterdir() if ours.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # or one of them is gone by now
        return []


class SavingLock:
    """Says that this process saves to a name.

    Attributes:
        is_held: False: the file system has no locks, and another process may save there, too.

    Raises:
        UsageError: another process does so now.
        OSError: no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f".{folder.name}.saving")
        self.is_held = True
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _LOCKED:
                    os.close(self._file)
                    raise UsageError(
                        f"another run is saving to {folder} now: this one writes nothing",
                        hint="give each run a folder of its own",
                    ) from error
                self.is_held = False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), self._path.stat()):
                    return
            os.close(self._file)  # whoever had it has removed the name since

    def close(self) -> None:
        """Others may save there."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some network file systems flush files only: their names are the server's concern
    finally:
        os.close(handle)


def put_in_place(part: Path, folder: Path) -> None:
    """Have what was written at `part_of` be the folder; one that was there is among the leftovers then.

    Raises:
        OSError: it is not whole, or cannot be renamed; then the old one stands.
    """
    flush(part / FACTS)
    flush(part)
    if not folder.exists():
        part.rename(folder)
    elif not _exchange(part, folder):
        before = part.with_suffix(".before")
        folder.rename(before)
        try:
            part.rename(folder)
        except OSError:
            before.rename(folder)
            raise
    flush(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; False: the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def remove(folder: Path, number: str) -> None:
    """Remove one of `leftovers`, as the save of a number; what cannot be removed now is tried again by the next one."""
    gone = folder.with_name(re.sub(r"(\.[0-9a-f]{8})?\.\w+$", f".{number}.gone", folder.name))
    with suppress(OSError):  # another process was faster, or it is not ours
        folder.rename(gone)
        (gone / FACTS).unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)
