"""How sure the ratio of two medians is: the percentile interval of a bootstrap (Efron 1979, Bootstrap methods).

A resample of n values is n of them drawn with replacement, and its median is one of the sorted values (or the mean of
two), at the rank of a median of n uniform numbers. That rank has a beta distribution, so each resample's median is
drawn at once from that: the same distribution as with all n draws, whatever n is.

It takes steps for independent. Steps of a run are not quite that: what slows one often slows the next, so the interval
is rather too narrow than too wide.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 10
"""Values below which there is no interval: the resamples of so few say little of what was not seen."""
LEVEL = 0.95
_RESAMPLES = 2000


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> tuple[float, float] | None:
    """Between what the ratio of the medians of two samples lies, to about 95 % for independent values.

    The same samples give the same interval.

    Args:
        upper: Values of the numerator, at least `LEAST`.
        lower: Values of the denominator, above zero, as many.

    Returns:
        Its ends; None: the samples are too small, or do not vary at all.
    """
    if min(len(upper), len(lower)) < LEAST:
        return None
    rng, above, below = random.Random(0), sorted(upper), sorted(lower)  # noqa: S311
    ratios = sorted(_median(rng, above) / _median(rng, below) for _ in range(_RESAMPLES))
    left_out = round(_RESAMPLES * (1 - LEVEL) / 2)
    low, high = ratios[left_out], ratios[-left_out - 1]
    return (low, high) if low < high else None


def _median(rng: random.Random, values: Sequence[float]) -> float:
    """The median of one resample of sorted values."""
    count, half = len(values), len(values) // 2
    if count % 2:
        return values[int(count * rng.betavariate(half + 1, half + 1))]
    before = rng.betavariate(half, half + 1)
    after = 1 - (1 - before) * (1 - rng.random()) ** (1 / half)  # the least of `half` uniform numbers above it
    return (values[int(count * before)] + values[min(count - 1, int(count * after))]) / 2
