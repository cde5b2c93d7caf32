"""Workers that are alike: swapping two of them changes no price, so a model needs them once, with a count."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from assigner.cost import PartitionCost
    from assigner.solver.problem import Problem


def group_workers(problem: Problem, micro_batch: int) -> tuple[tuple[str, ...], ...]:
    """The workers that may be used in groups of like ones, in the order of their first members.

    Two are alike if they have the same capacity and prices at this micro-batch size, the same pins allow them, and
    swapping them leaves every link as it was. Swaps compose, so it is enough to compare with one of each group.
    """
    groups: list[list[str]] = []
    signatures: list[Hashable] = []
    prices: dict[str, tuple[PartitionCost | None, ...]] = {}
    for worker in problem.workers:
        twin = problem.twins[worker.name]
        if twin not in prices:
            prices[twin] = worker_prices(problem, twin, micro_batch)
        order = problem.options.order
        turn = order.index(worker.name) if worker.name in order else None
        signature = (worker.tensor_bytes, turn, prices[twin])
        for n, group in enumerate(groups):
            if signatures[n] == signature and _swap(problem, group[0], worker.name):
                group.append(worker.name)
                break
        else:
            groups.append([worker.name])
            signatures.append(signature)
    return tuple(tuple(group) for group in groups)


def worker_prices(problem: Problem, worker: str, micro_batch: int) -> tuple[PartitionCost | None, ...]:
    """What each partition costs on a worker; None: it may not, or cannot, be placed there."""
    cost, device = problem.cost, problem.profile.worker[worker]
    return tuple(
        cost.partition(name, worker, micro_batch)
        if problem.allowed(name, device) and cost.obstacle(name, worker, micro_batch) is None
        else None
        for name in problem.order
    )


def _swap(problem: Problem, first: str, second: str) -> bool:
    """True if swapping two workers leaves all links as they are."""
    way = problem.ways
    one, other = way[first], way[second]
    others: Sequence[str] = [name for name in way if name not in (first, second)]
    return (
        one[second] == other[first]
        and all(one[name] == other[name] for name in others)
        and all(way[name][first] == way[name][second] for name in others)
    )
