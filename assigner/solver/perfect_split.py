"""The bound that all searches share: work split perfectly among workers, each at what it does best.

With any weights w[k] >= 0, loads of at most m on each worker give

    m sum of w[k] over the workers  >=  sum over partitions i of min over k of w[k] seconds[k, i]

With w[k] the speed at which k does everything, this is tight where workers differ in speed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def perfect_split(seconds: Floats) -> tuple[Floats, Floats]:
    """The weight of each worker, and the least weighted seconds of each position; inf: it can be nowhere.

    Args:
        seconds: [worker or group of like ones, position]; inf: not there.
    """
    there = np.where(np.isfinite(seconds), seconds, 0.0)
    totals = there.sum(axis=1)
    weights = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    return weights, least_work(seconds, weights)


def least_work(seconds: Floats, weights: Floats) -> Floats:
    """The least weighted seconds of each position; inf: it can be nowhere. Arguments as above; one weight a row."""
    there = np.where(np.isfinite(seconds), seconds, 0.0) * weights[:, None]
    least: Floats = np.where(np.isfinite(seconds), there, np.inf).min(axis=0, initial=np.inf)
    return least
