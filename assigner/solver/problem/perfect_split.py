"""The bound that all searches share: work split perfectly among workers, each at what it does best.

With any weights w[k] >= 0, loads of at most m on each worker give

    m sum of w[k] over the workers  >=  sum over partitions i of min over k of w[k] seconds[k, i]

With w[k] the speed at which k does everything, this is tight where workers differ in speed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.problem.objectives import Remainder

if TYPE_CHECKING:
    from assigner.solver.problem.arrays import Floats, Ints
    from assigner.solver.problem.interval_prices import IntervalPrices


_LEAST_S = 1e-300
"""A worker that does all in less has no weight: one over it is no float."""


def perfect_split(seconds: Floats) -> tuple[Floats, Floats]:
    """The weight of each worker, and the least weighted seconds of each position; inf: it can be nowhere.

    `seconds`: [worker or group of like ones, position]; inf: not there.
    """
    there = np.where(np.isfinite(seconds), seconds, 0.0)
    totals = there.sum(axis=1)
    weights = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals >= _LEAST_S)
    return weights, least_work(seconds, weights)


def split_among(seconds: Floats, most: int) -> tuple[list[float], list[float], float]:
    """As of `perfect_split`; and all the weight that a plan can have on `most` workers. A row for each worker."""
    weights, least = (found.tolist() for found in perfect_split(seconds))
    return weights, least, sum(sorted(weights)[-most:])


def least_work(seconds: Floats, weights: Floats) -> Floats:
    """The least weighted seconds of each position; inf: it can be nowhere. Arguments as above; one weight a row."""
    there = np.where(np.isfinite(seconds), seconds, 0.0) * weights[:, None]
    least: Floats = np.where(np.isfinite(seconds), there, np.inf).min(axis=0, initial=np.inf)
    return least


class WorkBefore:
    """What lies in front of a position at its least: sums over the best worker each, and the perfect split.

    Attributes:
        weight: Of forward and backward together, and of each by itself as far as it lies on the spine: [3, group].
        work: Weighted by those, of all positions before one: [3, 0 .. n].
    """

    def __init__(self, table: IntervalPrices) -> None:
        always = np.array([rule == "always" for rule in table.problem.remat_rules])
        again = np.where(always, table.figures("recompute_s"), 0.0)
        ways = np.stack([table.figures("forward_s"), table.figures("backward_s") + again])
        spine = table.problem.spine
        along = [
            np.where(np.isfinite(way), np.where(on, way, 0.0), np.inf)
            for on, way in zip((spine.forward, spine.backward), ways, strict=True)
        ]
        split = [perfect_split(seconds) for seconds in (ways.sum(axis=0), *along)]
        self.weight: Floats = np.stack([weight for weight, _ in split])
        self.work: Floats = np.stack([_before(work) for _, work in split])
        forward, backward = (way.min(axis=0) for way in along)
        self._both, self._forward = _before(forward + backward), _before(forward)
        self._ends = spine.start
        self._update = float(table.figures("update_s")[:, self._ends].min())

    def before(self, first: Ints, room: Floats, both: Floats | float = 0.0) -> Remainder:
        """What lies before positions.

        Args:
            first: The positions.
            room: Speed of the workers that are free, or of as many of the fastest of them as may be used: [3, label].
            both: Seconds of one forward and one backward, where more is known than the best worker of each.
        """
        work = self.work[:, first]
        none = room <= 0
        level = np.where(work > 0, work / np.where(none, 1.0, room), 0.0)
        level = np.where(none & (work > 0), np.inf, level)
        update = np.where(first > self._ends, self._update, 0.0)
        both = np.maximum(self._both[first], both)
        return Remainder(both, self._forward[first], level[0], level[1], level[2], update)


def _before(values: Floats) -> Floats:
    """Sums of all before each position, 0 .. n."""
    return np.concatenate([[0.0], np.cumsum(values)])
