"""Errors in the user's own code: told with their line there, not as a bug of this program."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from assigner.errors import AssignerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def user_line(error: BaseException) -> str:
    """`FILE:LINE (code)` of the innermost frame of an error that lies outside torch and this package."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    if isinstance(error, SyntaxError) and error.filename:  # of the file that is read; the frames are the importer's
        return f"{error.filename}:{error.lineno} ({(error.text or '').strip()})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    if not frames:
        return "an unknown line"
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's code; what it raises becomes a UsageError with the line in it.

    Args:
        what: Whose code it is, as the subject of "... failed".

    Raises:
        UsageError: the code raised anything but an error of this package.
    """
    try:
        yield
    except AssignerError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a workload would end the command as if all were done
        said = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
        raise UsageError(
            f"{what} failed at {user_line(error)}: {message}", hint="-v shows the whole traceback"
        ) from error
