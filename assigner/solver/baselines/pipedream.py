"""PipeDream's planner: contiguous stages, the slowest of which, or of the messages between them, is as fast as can be.

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3.1. Without
replication its recurrence over the layers 1 .. j and m workers is

    A(j, m) = min over s < j of max( A(s, m - 1), 2 a_s / B, T(s + 1 .. j) )

with T the forward and backward times, a_s the bytes that layer s hands on, and B the bandwidth. It knows one time per
layer and one bandwidth per level of the network: here the first worker's times, and the mean over the links. The value
of the recurrence is found by `least_largest_blocks`; its stages go to the workers in the order of their ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner.solver.baselines.blocks import least_largest_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem import Problem


def least_bottleneck(pricing: BaselinePrices) -> Iterator[Plan]:
    """Its plan at each micro-batch count; a tie goes to fewer stages, and then to the more even ones."""
    workers = pricing.workers[: pricing.problem.most_workers]
    bandwidth = mean_bandwidth(pricing.problem)
    for count in pricing.counts:
        seconds = pricing.seconds_on(workers[0], count)
        if seconds:
            size = pricing.problem.prices(count).size
            cut_s = [2 * each / bandwidth if bandwidth else math.inf for each in cut_bytes(pricing.problem, size)]
            yield pricing.contiguous(count, workers, least_largest_blocks(seconds, len(workers), cut_s=cut_s))


def mean_bandwidth(problem: Problem) -> float:
    """Bytes per second of the largest measured messages, the mean over all links; 0: there are none."""
    largest = [link.points[-1] for link in problem.profile.links]
    rates = [point.bytes / point.seconds if point.seconds else math.inf for point in largest]
    return sum(rates) / len(rates) if rates else 0.0


def cut_bytes(problem: Problem, micro_batch: int) -> list[float]:
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
