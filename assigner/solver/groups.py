"""Workers that are alike: swapping two of them changes no price, so a model needs them once, with a count."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from assigner.profile import Worker
    from assigner.solver.problem import Problem


def group_workers(problem: Problem, micro_batch: int) -> tuple[tuple[str, ...], ...]:
    """The profile's workers in groups of like ones, in the order of their first members.

    Two are alike if they have the same capacity and prices at this micro-batch size, the same pins allow them, and
    swapping them leaves every link as it was. Swaps compose, so it is enough to compare with one of each group.
    """
    groups: list[list[str]] = []
    signatures: list[Hashable] = []
    for worker in problem.profile.workers:
        signature = _signature(problem, worker, micro_batch)
        for n, group in enumerate(groups):
            if signatures[n] == signature and _swap(problem, group[0], worker.name):
                group.append(worker.name)
                break
        else:
            groups.append([worker.name])
            signatures.append(signature)
    return tuple(tuple(group) for group in groups)


def _signature(problem: Problem, worker: Worker, micro_batch: int) -> Hashable:
    cost, name = problem.cost, worker.name
    prices = tuple(
        cost.partition(partition, name, micro_batch) if cost.obstacle(partition, name, micro_batch) is None else None
        for partition in problem.order
    )
    turn = problem.options.order.index(name) if name in problem.options.order else None
    allowed = tuple(problem.allowed(partition, worker) for partition in problem.order)
    return worker.capacity_bytes, prices, allowed, turn


def _swap(problem: Problem, first: str, second: str) -> bool:
    """True if swapping two workers leaves all links as they are."""

    def way(source: str, target: str) -> Hashable:
        link = problem.cost.link(source, target)
        return None if link is None else (_sweep(link.points), link.sender_busy, link.receiver_busy)

    def _sweep(points: Sequence[object]) -> Hashable:
        return tuple((point.bytes, point.seconds) for point in points)  # type: ignore[attr-defined]

    others = [worker.name for worker in problem.profile.workers if worker.name not in (first, second)]
    return way(first, second) == way(second, first) and all(
        way(first, other) == way(second, other) and way(other, first) == way(other, second) for other in others
    )
