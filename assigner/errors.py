"""The errors a user can meet: one root, few leaves, each with its exit code.

    AssignerError                 1   a bug in this program
    ├── UsageError                2   a flag, a value or a workload that cannot be used as given
    │   └── MarkingError          2   the model's forward cannot be cut at the marked modules
    ├── NoPlanError
    │   ├── InfeasibleError       3   no plan exists, and that is proven
    │   └── LimitError            4   no plan was found: a limit stopped the search before that was proven
    ├── FormatError               5   a file is broken, or files do not fit together
    ├── MeasurementError          6   a measurement was lost
    └── WorkerError               7   a worker failed during a run

Every error says what is wrong, the offending value and where; `hint` is the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from assigner.formatting import LONGEST, printable


class AssignerError(Exception):
    """Root of every error that this package raises on purpose.

    What a message quotes may come from anywhere: control characters in it are written out, and it has an end.

    Args:
        message: What is wrong, with the offending value and where it was found.
        hint: What to do next; printed on a line of its own.

    Attributes:
        trace: The traceback of an error in the user's code, or on another rank, that is behind this one.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = printable(message, most=LONGEST)
        hint = None if hint is None else printable(hint, most=LONGEST)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.trace = ""
        if hint is not None:
            self.add_note(f"hint: {hint}")  # what Python prints of it where nobody catches it


class UsageError(AssignerError, ValueError):
    """A flag, a value or a workload that cannot be used as given."""

    exit_code = 2


class MarkingError(UsageError):
    """The model's forward cannot be cut at the modules that were marked."""


class OtherwiseError(UsageError, AttributeError):
    """A name of plain torch's that has another way here; `hasattr` finds nothing."""


class Otherwise:
    """A name of plain torch's in the class body of what has another way for it.

    `whose` has no such name, or no such method where it is `called`; `hint` is the way that it has, and `why` the
    reason.
    """

    def __init__(self, whose: str, hint: str, why: str = "", *, called: bool = True) -> None:
        self._whose, self._hint, self._why, self._name = whose, hint, why, ""
        self._end = "()" if called else ""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, *_: object) -> NoReturn:
        raise OtherwiseError(
            f"{self._whose} has no {self._name}{self._end}{self._why and f': {self._why}'}", hint=self._hint
        )


@dataclass(frozen=True)
class WayOut:
    """A change with which a problem that has no plan has one."""

    what: str  # what changes, in a few words
    how: str  # the flag to give or to drop, or what to do where no flag does it
    # of the objective, of a plan that was found with it: solving with it gives no more. Seconds, of cost money per
    # sample
    value: float
    objective: str = "step"  # what the value is of: "step", "throughput", "latency" or "cost"


class NoPlanError(AssignerError):
    """There is no plan to answer with.

    Args:
        message: The tightest obstacle.
        hint: The cheapest way out.
        ways_out: All that were found by solving, the cheapest first.
        untried: What may be a way out too, but the time was too short to find out.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, ways_out: tuple[WayOut, ...] = (), untried: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.ways_out = ways_out
        self.untried = untried


class InfeasibleError(NoPlanError):
    """No plan satisfies the constraints, and that is proven."""

    exit_code = 3


class LimitError(NoPlanError):
    """No plan was found, and it is not proven that there is none: the time or another limit came first."""

    exit_code = 4


class FormatError(AssignerError, ValueError):
    """A file is broken, or two files do not belong together."""

    exit_code = 5


class MeasurementError(AssignerError):
    """A measurement was lost: a worker stopped answering while it was measured."""

    exit_code = 6


class WorkerError(AssignerError):
    """A worker failed while a plan was run."""

    exit_code = 7
