"""What was measured of one thing, more than once: the middle, and how far it spreads."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median, quantiles


@dataclass(frozen=True)
class Samples:
    """What was measured of one thing; seconds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def mean_s(self) -> float:
        """What one of them takes if their sum counts."""
        return fmean(self.seconds)

    @property
    def iqr_s(self) -> float:
        """Between the quarter that was fastest and the quarter that was slowest; 0 of one alone."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    @property
    def spread(self) -> float:
        """IQR / median; 0 where the median is no time."""
        middle = self.median_s
        return self.iqr_s / middle if middle > 0 else 0.0
