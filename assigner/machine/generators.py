"""Python's random generator and NumPy's in this process: what they hold, looked at and put back."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class GeneratorStates:
    """The states of Python's generator and of NumPy's; two of them can be compared.

    Args:
        python: As `random.getstate` gives it.
        numpy: As `numpy.random.get_state` gives it, its keys as bytes; None: NumPy's is not loaded, and holds nothing.
    """

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GeneratorStates:
        """As they are."""
        loaded = sys.modules.get("numpy.random")
        if loaded is None:
            return cls(random.getstate(), None)
        kind, keys, *rest = loaded.get_state()
        return cls(random.getstate(), (kind, keys.tobytes(), *rest))

    def put_back(self) -> None:
        """Have the generators go on from here."""
        random.setstate(self.python)
        if self.numpy is not None:
            kind, keys, *rest = self.numpy
            sys.modules["numpy.random"].set_state((kind, memoryview(keys).cast("I"), *rest))


@contextlib.contextmanager
def kept_python() -> Iterator[None]:
    """Leave Python's and NumPy's generators as they were."""
    before = GeneratorStates.now()
    try:
        yield
    finally:
        before.put_back()
