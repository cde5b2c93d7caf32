"""What failed first: where, with which traceback, and the error of it that other ranks raise, of the same type.

    rank 1: raise ArithmeticError("the trap snapped")
    rank 0: except ArithmeticError as error:  str(error) begins with "the trap snapped", error.worker is "worker:1/cpu"

Only the names of its type and module come over the wire. The type is one of Python's own, torch's or this package's
that this process has loaded; any other error is a plain WorkerError here.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace

from assigner import errors
from assigner.errors import AssignerError, WorkerError
from assigner.launch.failurereport import FailureReport, hand_over, place_in
from assigner.launch.seal import clean

_PACKAGES = ("builtins", "torch", "assigner")
_NEVER = (StopIteration, StopAsyncIteration)  # a generator on its way would turn these into others


@dataclass(frozen=True)
class Failure:
    """The first cause.

    Args:
        worker: Who failed.
        where: What it was doing; empty: nobody knows.
        kind: The type of the error; empty: there is none, the worker is gone.
        module: Where that type is defined.
    """

    worker: str
    where: str
    error: str
    kind: str = ""
    module: str = ""
    trace: str = ""
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.worker} failed{' in ' if self.where else ''}{self.where}: {self._said}"

    @property
    def _said(self) -> str:
        return ": ".join(filter(None, (self.kind, self.error)))

    def cleaned(self) -> Failure:
        """The same as another process may show it on a screen."""
        texts = {each.name: clean(text) for each in fields(self) if isinstance(text := getattr(self, each.name), str)}
        return replace(self, **texts)

    def hand_over(self, *, to_tell_of: str) -> bool:
        """Give it to the launcher, if that is ours; see `assigner.launch.failurereport`.

        Args:
            to_tell_of: The worker of this process.
        """
        ours = self.module == AssignerError.__module__  # its message says it all
        code = getattr(errors, self.kind, WorkerError).exit_code if ours else WorkerError.exit_code
        what = self.error if ours else ", in ".join(filter(None, (self._said, self.where)))
        place = "" if ours else place_in(self.trace)
        is_own = self.worker == to_tell_of
        return hand_over(FailureReport(self.worker, what, self.hint, code, self.trace, place, is_own=is_own))

    @property
    def told(self) -> str:
        """All of it, with the traceback."""
        trace = f"\n--- traceback of {self.worker} ---\n{self.trace.rstrip()}\n---" if self.trace else ""
        return f"{self}{trace}"

    def to_error(self, *, traced: bool = True) -> WorkerError:
        """The failure as an error on a rank that did not fail itself; where it was raised, of the same type."""
        if not self.kind:
            return WorkerError(str(self), hint=self.hint)
        error = remote_error(self)
        if traced and self.trace:
            error.add_note(f"--- traceback of {self.worker} ---\n{self.trace.rstrip()}\n---")
        return error


class OtherWorkerError(WorkerError):
    """An error that was raised on another rank. Where that is possible, also an instance of the error's own type.

    Attributes:
        worker: Who raised it.
        where: What it was doing.
        trace: Its traceback.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error, hint=failure.hint)
        self.worker, self.where, self.trace = failure.worker, failure.where, failure.trace
        self._came_from = f"{failure.kind} on {self.worker}{', in ' if self.where else ''}{self.where}"

    def __str__(self) -> str:
        return f"{self.message}\n({self._came_from})" if self.message else f"({self._came_from})"


def remote_error(failure: Failure) -> OtherWorkerError:
    """The error of another rank."""
    found = _loaded_type(failure.module, failure.kind)
    if found is None or not _takes_a_message(found):
        return OtherWorkerError(failure)
    made: type[OtherWorkerError] = type(failure.kind, (OtherWorkerError, found), {"__module__": __name__})
    return made(failure)


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


def gloo_words(error: BaseException) -> str:
    """What gloo says of a broken connection, without the line of its source and its advice."""
    text = re.sub(r"^\[\S+\] |\. This is typically.*", "", " ".join(str(error).split()))
    return f" ({text[:160]})" if text else ""
