"""An error of another rank, raised on this one: the same type and message as there.

    rank 1: raise ArithmeticError("the trap snapped")
    rank 0: except ArithmeticError as error:  str(error) begins with "the trap snapped", error.worker is "worker:1/cpu"

Only the names of its type and module come over the wire. The type is one of Python's own, torch's or this package's
that this process has loaded; any other error is a plain WorkerError here.
"""

from __future__ import annotations

import sys
from typing import Any

from assigner.errors import WorkerError

_PACKAGES = ("builtins", "torch", "assigner")
_NEVER = (StopIteration, StopAsyncIteration)  # a generator on its way would turn these into others


class OtherWorkerError(WorkerError):
    """An error that was raised on another rank. Where that is possible, also an instance of the error's own type.

    Args:
        message: What the error said there.
        worker: Who raised it.
        where: What it was doing.
        kind: The name of its type.
        trace: Its traceback.
        hint: What to do next.

    Attributes:
        worker, where, trace: As the arguments.
    """

    def __init__(
        self, message: str, *, worker: str, where: str, kind: str, trace: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.worker, self.where, self.trace = worker, where, trace
        self._came_from = f"{kind} on {worker}{', in ' if where else ''}{where}"

    def __str__(self) -> str:
        return f"{self.message}\n({self._came_from})" if self.message else f"({self._came_from})"


def remote_error(module: str, kind: str, message: str, **about: Any) -> OtherWorkerError:
    """The error of another rank.

    Args:
        module: Where its type is defined.
        kind: The type's name.
        message: What it said.
        about: More arguments of `OtherWorkerError`.
    """
    found = _loaded_type(module, kind)
    if found is None or not _takes_a_message(found):
        return OtherWorkerError(message, kind=kind, **about)
    made: type[OtherWorkerError] = type(kind, (OtherWorkerError, found), {"__module__": __name__})
    return made(message, kind=kind, **about)


def _loaded_type(module: str, kind: str) -> type[Exception] | None:
    """A type of the packages that are allowed; None: it is none, or this process has not loaded it."""
    if module.partition(".")[0] not in _PACKAGES:
        return None
    found = getattr(sys.modules.get(module), kind, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(found, _NEVER):
        return None
    return None if issubclass(OtherWorkerError, found) else found  # it is one of its bases already


def _takes_a_message(kind: type[Exception]) -> bool:
    try:
        kind("")
    except Exception:  # noqa: BLE001 - as it pleases: a UnicodeDecodeError wants five arguments
        return False
    return True
