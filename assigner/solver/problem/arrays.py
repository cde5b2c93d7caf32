"""Arrays of the solver: by what they hold, for annotations, and several of them side by side.

What their axes are stands where they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Columns:
    """Arrays side by side, whose last axes run over the same things: the base of dataclasses with slots."""

    __slots__: tuple[str, ...] = ()

    def take(self, which: Ints | Flags | Sequence[int]) -> Self:
        """Of all arrays what stands at these places."""
        return type(self)(*(getattr(self, name)[..., which] for name in self.__slots__))

    @classmethod
    def join(cls, blocks: Sequence[Self]) -> Self:
        """What some have, one behind the other."""
        return cls(*(np.concatenate([getattr(each, name) for each in blocks], axis=-1) for name in cls.__slots__))
