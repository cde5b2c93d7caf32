"""A claim over many draws: some in every run of the tests, the others where there is time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def sweep(draws: Iterable[Any], *, quick: int | Iterable[Any]) -> list[Any]:
    """Parameters of a test: those in `quick` as they are, the others marked `sweep`.

    Args:
        draws: Seeds, or other parameters; a tuple is of several parameters.
        quick: That many of the first; or which.
    """
    every = list(draws)
    kept = every[:quick] if isinstance(quick, int) else list(quick)
    missing = [draw for draw in kept if draw not in every]
    assert not missing, f"{missing} are none of the draws"
    return [
        draw if draw in kept else pytest.param(*(draw if isinstance(draw, tuple) else (draw,)), marks=pytest.mark.sweep)
        for draw in every
    ]
