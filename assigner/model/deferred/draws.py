"""Where each of a builder's draws starts: at a state that the builder has set, or where an earlier draw has ended.

Draws on the meta device leave a generator alone, so after each of them the generator is given a state that no generator
comes to by itself, its mark. A generator that is found at a mark goes on where that draw has ended; this holds for a
state that was kept and set again, for forks, and for a generator that took over another's state. Any other state is a
seed. What cannot be followed so, or in another way, is a `BuilderError`.

Python's generator and NumPy's draw true values meanwhile. Of these it is noted where a builder's own seeds fall.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import AssignerError
from assigner.machine.generators import GeneratorStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# 64-bit words of a state amid the Mersenne Twister's own, which have 32 bits each. The seed, that torch.initial_seed()
# tells, lies outside.
_SIGN, _NUMBER = 300, 301
_MARKED = 0xA551_6E4D


class BuilderError(AssignerError):
    """The builder does what cannot be replayed; the message is what, as in "the model's builder ... at LINE"."""


class Draws:
    """The marks that a builder's draws have left, and the generators that it draws from."""

    def __init__(self) -> None:
        self.marks: dict[bytes, int] = {}  # a state -> the number of the call whose end it stands for
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}  # each with its state before all draws

    def start(self, generator: torch.Generator, number: int) -> torch.Tensor | int:
        """Mark a generator as one from which call `number` has drawn.

        From where that call draws is returned: a generator's state, or the number of the call where it goes on.
        """
        if generator.device.type != "cpu":
            raise BuilderError(
                f"draws from a generator on {generator.device}",
                hint="give it a generator on the CPU: first values are made there, the same for every device",
            )
        with _disable_current_modes():
            state = generator.get_state()
            self.generators.setdefault(id(generator), (generator, state))
            mark = state.clone()
            words = mark.view(torch.int64)
            words[_SIGN], words[_NUMBER] = _MARKED, number
            generator.set_state(mark)
            source = self.marks.get(fingerprint(state.numpy()), state)
            self.marks[fingerprint(mark.numpy())] = number
        return source

    def restore(self) -> None:
        """Give every generator the state that it had before the builder drew from it."""
        for generator, state in self.generators.values():
            generator.set_state(state)


class SharedDraws:
    """The states that a builder draws from of the generators of Python and of NumPy that all code shares.

    before -> random.seed(42) -> draws -> random.seed(7)       42's alone: nobody has drawn from what was before
    """

    _SEEDING = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))

    def __init__(self) -> None:
        self.python: list[Any] = []
        self.numpy: list[Any] = []
        self._start = GeneratorStates.now()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note those of the block. A function for seeding that was imported by its own name before is not seen."""
        with contextlib.ExitStack() as stack:
            for module, name in self._SEEDING:
                stack.enter_context(mock.patch.object(module, name, self._setting(getattr(module, name))))
            yield
            self._end()

    def _setting(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_anew(*args: Any, **words: Any) -> None:
            self._end()
            original(*args, **words)
            self._start = GeneratorStates.now()

        return set_anew

    def _end(self) -> None:
        start, now = self._start, GeneratorStates.now()
        if start.python != now.python:
            self.python.append(start.python)
        if start.numpy != now.numpy:
            self.numpy.append(start.numpy)


def fingerprint(array: np.ndarray[Any, Any]) -> bytes:
    """What tells an array's values from others."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()
