"""A folder that takes a name at once: who looks finds the whole of the old one or the whole of the new one.

    .at.part    the new one, written and flushed to the disk
    at          the old one            both names are exchanged by one call of Linux; then the old one is removed

A file system that cannot exchange names (NFS) takes two renames, and a process that is killed between them leaves
`.at.before`, the old one, and `.at.part`, the new one. One file is the seal of a folder: it is written last and removed
first, so a folder that has it is whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)


def part_of(folder: Path) -> Path:
    """Where the folder of a name is written, beside it."""
    return folder.with_name(f".{folder.name}.part")


def _before_of(folder: Path) -> Path:
    """Where the folder that had a name is while another takes it, and names cannot be exchanged."""
    return folder.with_name(f".{folder.name}.before")


def leftovers(folder: Path) -> list[Path]:
    """What saves to this name that were broken off have left."""
    return [path for path in (part_of(folder), _before_of(folder)) if path.is_dir()]


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


def put_in_place(folder: Path, seal: str) -> None:
    """Have what was written at `part_of` be the folder; one that is there is removed once the new one stands.

    Args:
        folder: The name.
        seal: The file that says that a folder is whole.

    Raises:
        OSError: it cannot be renamed; then the old one stands.
    """
    part, before = part_of(folder), _before_of(folder)
    flush(part)
    if not folder.exists():
        part.rename(folder)
    elif not _exchange(part, folder):
        _remove(before, seal)
        folder.rename(before)
        try:
            part.rename(folder)
        except OSError:
            before.rename(folder)
            raise
    flush(folder.parent)
    _remove(part, seal)
    _remove(before, seal)


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


def _remove(folder: Path, seal: str) -> None:
    """Remove what is left over, its seal first; what cannot be removed now is tried again by the next save."""
    if folder.is_dir():
        (folder / seal).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
