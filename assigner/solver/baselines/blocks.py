"""A line of times cut into contiguous blocks so that the largest block, or the slowest cut, is least.

Under a limit on both, taking from the left as much as fits needs the fewest blocks. So the least limit is found by
halving an interval, and among the cuts that keep it an even one is taken: O(n) a halving, some 50 halvings.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def least_largest_blocks(seconds: Sequence[float], most: int, *, cut_s: Sequence[float] | None = None) -> list[int]:
    """Sizes of contiguous blocks, none empty, of which the largest sum, or the slowest cut between two, is least.

    Args:
        seconds: The line, in seconds; one value or more.
        most: Blocks at most.
        cut_s: Seconds of a cut in front of each position. With them there are as few blocks as reach the least value;
            None: cuts cost nothing, and there are as many blocks as may be.
    """
    line = _Line(seconds, [0.0] * len(seconds) if cut_s is None else cut_s)
    low, limit, number = 0.0, line.sums[-1], 1
    middle = max(limit / most, *seconds, 0.0)
    while low < middle < limit:
        ends = line.fill(middle)
        if ends is None or len(ends) > most:
            low = middle
        else:
            number, limit = len(ends), line.value(ends)
        middle = (low + limit) / 2
    return line.even(limit, number if cut_s is not None else min(most, len(seconds)))


class _Line:
    """Positions 0 .. n - 1 with their times; an end is the position behind a block's last."""

    def __init__(self, seconds: Sequence[float], cut_s: Sequence[float]) -> None:
        self.n = len(seconds)
        self.sums = list(itertools.accumulate(seconds, initial=0.0))
        self.cut_s = [0.0, *cut_s[1:], 0.0]  # nothing is cut in front of the first, nor behind the last

    def value(self, ends: Sequence[int]) -> float:
        """The largest block or cut."""
        sums = self.sums
        return max(max(sums[b] - sums[a], self.cut_s[b]) for a, b in itertools.pairwise((0, *ends)))

    def open_cuts(self, limit: float) -> list[int]:
        """The ends that a block may have, the line's own among them."""
        return [end for end in range(self.n + 1) if self.cut_s[end] <= limit]

    def reach(self, start: int, limit: float) -> int:
        """The furthest end of a block from `start` whose sum, as it is computed, keeps the limit."""
        sums = self.sums
        end = max(start, bisect_right(sums, sums[start] + limit) - 1)
        while end < self.n and sums[end + 1] - sums[start] <= limit:
            end += 1
        while sums[end] - sums[start] > limit:
            end -= 1
        return end

    def fill(self, limit: float) -> list[int] | None:
        """Ends of the fewest blocks that keep the limit; None: none do."""
        cuts, ends, at = self.open_cuts(limit), [], 0
        while at < self.n:
            end = cuts[bisect_right(cuts, self.reach(at, limit)) - 1]
            if end <= at:
                return None
            ends.append(end)
            at = end
        return ends

    def even(self, limit: float, number: int) -> list[int]:
        """Sizes of `number` blocks that keep a limit that can be kept, each near the mean of what is left."""
        sums, cuts = self.sums, self.open_cuts(limit)
        earliest = [self.n]  # earliest[k]: from here on k blocks are enough
        for _ in range(number - 1):
            end = earliest[-1]
            near = bisect_left(cuts, True, key=lambda c, end=end: sums[end] - sums[c] <= limit)  # type: ignore[misc]
            earliest.append(cuts[near])
        sizes, at = [], 0
        for rest in range(number - 1, -1, -1):
            mean = (sums[-1] - sums[at]) / (rest + 1)
            low = bisect_left(cuts, max(at + 1, earliest[rest]))
            high = bisect_right(cuts, min(self.reach(at, limit), self.n - rest))
            end = min(cuts[low:high], key=lambda c: abs(sums[c] - sums[at] - mean))
            sizes.append(end - at)
            at = end
        return sizes
