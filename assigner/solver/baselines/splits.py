"""The chain cut into blocks by a rule: one block, equal ones, in proportion to speed, balanced by time."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from assigner.solver.baselines.blocks import least_largest_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.baselines.prices import BaselinePrices


_LEAST_S = 1e-300
"""Shorter times have no reciprocal that is a float."""


def single(pricing: BaselinePrices) -> Iterator[Plan]:
    """Everything on one worker; of like workers the first is enough."""
    allowed = {pricing.alike(worker): worker for worker in reversed(pricing.workers) if pricing.may_hold(worker)}
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
