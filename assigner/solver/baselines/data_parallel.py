"""The whole model on every worker, each with a share of the micro-batches: one stage that all workers share.

Each worker runs its micro-batches one after the other, forward and backward, and keeps one of them at a time; behind
the last one the gradients are summed among all. As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020), but
that a worker's share is a number of whole micro-batches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.problem.replica_options import least_shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.baselines.prices import BaselinePrices


def equal_shares(pricing: BaselinePrices) -> Iterator[Plan]:
    """The same number of micro-batches for every worker, as DistributedDataParallel has it.

    Where no number of micro-batches goes by the number of workers, shares differ by one: the first workers take more.
    With fewer micro-batches than workers it is none.
    """
    workers = _sharing(pricing)
    enough = [count for count in pricing.counts if workers and count >= len(workers)]
    whole = [count for count in enough if count % len(workers) == 0]
    for count in whole or enough:
        each, more = divmod(count, len(workers))
        yield _on(pricing, workers, [each + (n < more) for n in range(len(workers))], count)


def shares_by_speed(pricing: BaselinePrices) -> Iterator[Plan]:
    """Shares for which the worker that is through last is through as soon as can be; where one has all, it is none."""
    workers = _sharing(pricing)
    for count in pricing.counts:
        seconds = [sum(pricing.seconds_on(worker, count) or (math.inf,)) for worker in workers]
        if any(map(math.isfinite, seconds)):
            often = np.arange(1, count + 1)
            shares, _ = least_shares([np.concatenate(([0.0], often * each))[:, None] for each in seconds])
            taken = shares[:, 0].tolist()
            if sum(map(bool, taken)) >= min(2, len(workers)):
                yield _on(pricing, workers, taken, count)


def _sharing(pricing: BaselinePrices) -> list[str]:
    """The workers that may hold everything, as many as a plan and a stage of it may have."""
    most = (pricing.problem.options.max_workers, pricing.most_replicas, len(pricing.workers))
    return [worker for worker in pricing.workers if not pricing.problem.barred[worker]][: min(filter(None, most))]


def _on(pricing: BaselinePrices, workers: Sequence[str], shares: Sequence[int], count: int) -> Plan:
    replicas = tuple((worker, share) for worker, share in zip(workers, shares, strict=True) if share)
    return pricing.placed(count, [(replicas[0][0], pricing.problem.order)], replicas)
