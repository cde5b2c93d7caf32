"""The chain cut into blocks by a rule: one block, equal ones, in proportion to speed, by time, as PipeDream does."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from assigner.solver.baselines.blocks import least_largest_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem.problem import Problem


_LEAST_S = 1e-300
"""Shorter times have no reciprocal that is a float."""


def single(pricing: BaselinePrices) -> Iterator[Plan]:
    """Everything on one worker; of like workers the first is enough."""
    workers = filter(pricing.problem.may_hold, reversed(pricing.workers))
    allowed = {pricing.alike(worker): worker for worker in workers}
    for count in pricing.counts:
        for worker in sorted(allowed.values(), key=pricing.workers.index):
            yield pricing.contiguous(count, [worker], [len(pricing.problem.order)])


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
