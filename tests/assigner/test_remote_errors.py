"""An error of another rank keeps its type and message."""

from __future__ import annotations

import pytest
import torch

from assigner.errors import UsageError, WorkerError
from assigner.runtime.failures.cause import Failure, OtherWorkerError, remote_error

ABOUT = {"worker": "worker:1/cpu", "where": "forward of partition 'a'", "trace": "Traceback ..."}


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("builtins", "ArithmeticError", ArithmeticError),
        ("builtins", "KeyError", KeyError),
        ("builtins", "FileNotFoundError", FileNotFoundError),
        ("torch", "OutOfMemoryError", torch.OutOfMemoryError),
        ("assigner.errors", "UsageError", UsageError),
    ],
)
def test_the_type_is_the_same_and_a_workers(module, name, kind):
    """Whoever catches the type there catches it here; the message comes first, and it ends as a worker's error."""
    error = remote_error(Failure(error="no luck", kind=name, module=module, hint="try again", **ABOUT))
    assert isinstance(error, kind)
    assert isinstance(error, WorkerError)
    assert str(error) == f"no luck\n({name} on worker:1/cpu, in forward of partition 'a')"
    assert (error.exit_code, error.message, error.hint) == (7, "no luck", "try again")
    assert (error.worker, error.where, error.trace) == tuple(ABOUT.values())
    assert type(error).__name__ == name


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "UnicodeDecodeError"),  # takes five arguments
        ("builtins", "StopIteration"),
        ("builtins", "KeyboardInterrupt"),
        ("builtins", "print"),
        ("builtins", "NoSuchError"),
        ("assigner.errors", "WorkerError"),
        ("subprocess", "SubprocessError"),  # a package that is not allowed
        ("torch.never.loaded", "Error"),
        ("", ""),
    ],
)
def test_any_other_type_is_a_plain_workers_error(module, name):
    """Nothing is imported for a name that comes over the wire, and only errors are made."""
    error = remote_error(Failure(error="no luck", kind=name, module=module, **ABOUT))
    assert type(error) is OtherWorkerError
    assert str(error).startswith("no luck\n")
