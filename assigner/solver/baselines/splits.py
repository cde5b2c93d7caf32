"""The chain cut into blocks by a rule: one block, equal ones, in proportion to speed, by time, as PipeDream does."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem.problem import Problem

_LEAST_S = 1e-300
"""Shorter times have no reciprocal that is a float."""


def single(pricing: BaselinePrices) -> Iterator[Plan]:
    """Everything on one worker; of those with the same prices and room the first is enough."""
    cost, worker = pricing.problem.cost, pricing.problem.profile.worker
    allowed = [name for name in reversed(pricing.workers) if not pricing.problem.barred[name]]
    unlike = {(cost.first_alike[name], worker[name].tensor_bytes): name for name in allowed}
    for count in pricing.counts:
        for name in sorted(unlike.values(), key=pricing.workers.index):
            yield pricing.contiguous(count, [name], [len(pricing.problem.order)])


def equal(pricing: BaselinePrices) -> Iterator[Plan]:
    """The same number of partitions for every worker in rank order; the first ones take one more."""
    workers = pricing.workers[: pricing.problem.most_workers]
    each, more = divmod(len(pricing.problem.order), len(workers))
    for count in pricing.counts:
        yield pricing.contiguous(count, workers, [each + (n < more) for n in range(len(workers))])


def proportional(pricing: BaselinePrices) -> Iterator[Plan]:
    """Numbers of partitions in proportion to the speed at which each worker runs the whole model."""
    workers = pricing.workers[: pricing.problem.most_workers]
    for count in pricing.counts:
        times = [pricing.seconds_on(worker, count) for worker in workers]
        speeds = [1 / max(sum(seconds), _LEAST_S) if seconds else 0.0 for seconds in times]
        if sum(speeds):
            n, total = len(pricing.problem.order), sum(speeds)
            cuts = [math.floor(n * sum(speeds[:k]) / total + 0.5) for k in range(len(workers) + 1)]
            yield pricing.contiguous(count, workers, [b - a for a, b in itertools.pairwise(cuts)])


def balanced(pricing: BaselinePrices) -> Iterator[Plan]:
    """Blocks whose largest time, as measured on the first worker, is least: blind to how fast the others are.

    Source: torchgpipe.balance.balance_by_time (Kim et al., arXiv 2004.09910), which measures on one device and cuts
    with the block partitions of Barany and Grinberg; here the cut is the exact one.
    """
    workers = pricing.workers[: pricing.problem.most_workers]
    for count in pricing.counts:
        seconds = pricing.seconds_on(workers[0], count)
        if seconds:
            yield pricing.contiguous(count, workers, least_largest_blocks(seconds, len(workers)))


def least_bottleneck(pricing: BaselinePrices) -> Iterator[Plan]:
    """PipeDream's planner: the slowest stage, or message between two, is as fast as can be; a tie goes to fewer stages.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3.1.
    Without replication its recurrence over the layers 1 .. j and m workers is

        A(j, m) = min over s < j of max( A(s, m - 1), 2 a_s / B, T(s + 1 .. j) )

    with T the forward and backward times, a_s the bytes that layer s hands on, and B the bandwidth. It knows one time
    per layer and one bandwidth per level of the network: here the first worker's times, and the mean over the links.
    The value of the recurrence is found by `least_largest_blocks`; its stages, the more even ones of a tie, go to the
    workers in the order of their ranks.
    """
    workers = pricing.workers[: pricing.problem.most_workers]
    bandwidth = _mean_bandwidth(pricing.problem)
    for count in pricing.counts:
        seconds = pricing.seconds_on(workers[0], count)
        if seconds:
            size = pricing.problem.prices(count).size
            cut_s = [2 * each / bandwidth if bandwidth else math.inf for each in _cut_bytes(pricing.problem, size)]
            yield pricing.contiguous(count, workers, least_largest_blocks(seconds, len(workers), cut_s=cut_s))


def _mean_bandwidth(problem: Problem) -> float:
    """Bytes per second of the largest measured messages, the mean over all links; 0: there are none."""
    largest = [link.points[-1] for link in problem.profile.links]
    rates = [point.bytes / point.seconds if point.seconds else math.inf for point in largest]
    return sum(rates) / len(rates) if rates else 0.0


def _cut_bytes(problem: Problem, micro_batch: int) -> list[float]:
    """Per position: bytes of the values that are made before it and read there or behind it, each counted once."""
    cost = problem.cost
    steps = [0.0] * (len(problem.order) + 1)
    for output in cost.outputs:
        last = max(problem.position[edge.target] for edge in cost.readers[output])
        size = cost.output_bytes(output, micro_batch)
        steps[problem.position[output.partition] + 1] += size
        steps[last + 1] -= size
    found, crossing = [], 0.0
    for step in steps[:-1]:
        crossing += step
        found.append(crossing)
    return found


def least_largest_blocks(seconds: Sequence[float], most: int, *, cut_s: Sequence[float] | None = None) -> list[int]:
    """Sizes of contiguous blocks, none empty, of which the largest sum, or the slowest cut between two, is least.

    Under a limit on both, taking from the left as much as fits needs the fewest blocks. So the least limit is found by
    halving an interval, and among the cuts that keep it an even one is taken: O(n) a halving, some 50 halvings.

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
