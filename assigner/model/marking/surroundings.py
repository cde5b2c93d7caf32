"""What a forward can be told beside its arguments: context variables, the environment, torch's default type.

Each worker has its own, and a forward that runs again finds those that its first run has left.
"""

from __future__ import annotations

import contextvars
import os
from typing import TYPE_CHECKING, Any

import torch

from assigner.model.marking.collecting import collector_variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_COMPILERS = ("TORCHINDUCTOR_", "TRITON_")  # keep their folders in the environment once they have run
_ABSENT = object()


class Surroundings:
    """They as they are now."""

    def __init__(self) -> None:
        self._variables = dict(contextvars.copy_context().items())
        self._variables.pop(collector_variable(), None)
        self._environment = dict(os.environ)
        self._type = torch.get_default_dtype()

    def changes(self) -> list[str]:
        """The names of those that are another now, for people."""
        now = Surroundings()
        found = [f"the context variable {each.name!r}" for each in _others(self._variables, now._variables)]
        if self._environment != now._environment:
            names = [
                name
                for name in {**self._environment, **now._environment}
                if self._environment.get(name) != now._environment.get(name) and not name.startswith(_COMPILERS)
            ]
            found += [f"the environment variable {name!r}" for name in names]
        return found + (["torch's default type"] if self._type is not now._type else [])

    def put_back(self) -> None:
        """Have them as they were; but for context variables, which are those of the context that a call runs in."""
        for name in {**self._environment, **os.environ}:
            if name not in self._environment:
                del os.environ[name]
            elif os.environ.get(name) != self._environment[name]:
                os.environ[name] = self._environment[name]
        torch.set_default_dtype(self._type)


def _others(some: Mapping[Any, Any], others: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys of what is not the same object in both."""
    return (key for key in {**some, **others} if some.get(key, _ABSENT) is not others.get(key, _ABSENT))
