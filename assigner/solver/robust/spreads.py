"""The same profile at other points of its measurements' spreads: at the slow end, and drawn at random.

A profile stores the median m of each measurement and its spread s = IQR / m. Times are positive and lean to the slow
side, so a time is taken as lognormal with that median and that IQR:

    time = m * exp(sigma * z),  z standard normal,  2 sinh(sigma * q) = s  with q = 0.6745, the quartile of z

The upper quartile is then m * exp(asinh(s / 2)) = m * (s / 2 + sqrt(1 + (s / 2)^2)). For small spreads that is
m * (1 + s / 2), the symmetric distribution's, and sigma is s / 1.349. A symmetric one cannot hold spreads above 2:
its lower quartile would be negative, and short messages are measured with such spreads.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from assigner.formats.profile import LinkPoint, Measurement, Profile

QUARTILE = NormalDist().inv_cdf(0.75)
"""The upper quartile of a standard normal, 0.6745."""


@dataclass(frozen=True)
class Coverage:
    """How much of a profile says how far its times vary.

    Args:
        measurements: Of partitions, those that ran out of memory left out.
        measurements_spread: Those of them with a spread above zero.
        points: Of the sweeps of all links and collectives.
        points_spread: Those of them with a spread above zero.
    """

    measurements: int
    measurements_spread: int
    points: int
    points_spread: int

    @property
    def varies(self) -> bool:
        """True if a draw can differ from the medians."""
        return self.measurements_spread + self.points_spread > 0

    @classmethod
    def of(cls, profile: Profile) -> Coverage:
        """Count a profile's spreads."""
        timed = [each.spread for each in profile.measurements if each.infeasible is None]
        swept = [each.points for each in profile.links] + [each.points for each in profile.collectives]
        points = [point.spread for sweep in swept for point in sweep]
        return cls(len(timed), sum(s > 0 for s in timed), len(points), sum(s > 0 for s in points))


def slow_end(profile: Profile) -> Profile:
    """The profile with every measurement and every point of a link at its upper quartile, all at once.

    A plan solved from it is good where everything is slow together, which is worse than what a run meets: there,
    slow and fast moments partly even out. Bytes, busy shares and measurements without a spread stay as they are;
    partitions and workers that share a measurement share the slow one.
    """
    return _moved(profile, lambda _: QUARTILE)


def resampled(profile: Profile, seed: int) -> Profile:
    """One draw of the times in a profile, each from its own spread.

    One partition on one worker has one draw for its forward, backward and update at all micro-batch sizes, one link
    one for its sweep, each size by its own spread: a worker that is slow is slow at each size, and a line through two
    sizes drawn apart would be noise where it is stretched past them. So has each collective. Different partitions,
    workers and links are drawn independently; partitions and workers that share a measurement share its draw.

    The spread is the one from run to run. The median of n runs is known better, by 1.25 / sqrt(n); but the machines of
    a run drift from those of the measurement as runs do from each other, and so the wider one is drawn.

    The same profile and seed give the same draw.
    """
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    drawn: defaultdict[Hashable, float] = defaultdict(lambda: rng.gauss(0.0, 1.0))
    return _moved(profile, drawn.__getitem__)


def _factor(spread: float, z: float) -> float:
    """What a median is multiplied by, `z` standard deviations from it."""
    return math.exp(math.asinh(spread / 2) * z / QUARTILE)


def _moved(profile: Profile, z: Callable[[Hashable], float]) -> Profile:
    """The profile with the times of each pair (partition, worker), link and collective at their own `z`."""
    return replace(
        profile,
        measurements=tuple(_measurement(each, z((each.partition, each.worker))) for each in profile.measurements),
        links=tuple(
            replace(each, points=_points(each.points, z((each.source, each.target, "link")))) for each in profile.links
        ),
        collectives=tuple(
            replace(each, points=_points(each.points, z((*each.workers, "collective")))) for each in profile.collectives
        ),
    )


def _measurement(measured: Measurement, z: float) -> Measurement:
    factor = _factor(measured.spread, z)
    return replace(
        measured.with_backwards(factor),
        forward_s=measured.forward_s * factor,
        update_s=measured.update_s * factor,
        recompute_s=None if measured.recompute_s is None else measured.recompute_s * factor,
    )


def _points(points: Iterable[LinkPoint], z: float) -> tuple[LinkPoint, ...]:
    return tuple(replace(point, seconds=point.seconds * _factor(point.spread, z)) for point in points)
