"""A median and how far it may be off."""

from __future__ import annotations

import random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWS = 2000


class Interval(NamedTuple):
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float


def of_median(figures: Sequence[float]) -> Interval:
    """The percentile bootstrap (Efron, Annals of Statistics 7, 1979), seeded."""
    rng = random.Random(0)  # noqa: S311 (no secret)
    drawn = sorted(median(rng.choices(figures, k=len(figures))) for _ in range(DRAWS))
    return Interval(median(figures), drawn[round(0.025 * DRAWS)], drawn[round(0.975 * DRAWS) - 1])
