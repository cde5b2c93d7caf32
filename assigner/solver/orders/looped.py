"""Placements that schedule interleaved has for few partitions, by exhaustive search, as far as counted nodes reach.

Local search over placements goes from one that fits to another. Where links are missing, pins scatter the partitions or
memory is tight, there may be no such way from the plans at hand to the best, or no plan at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.solver import tuning
from assigner.solver.free.exhaustive import Exhaustive
from assigner.solver.free.pricing import StepPricing
from assigner.solver.free.set_memory import SetMemory
from assigner.solver.free.set_prices import SetPrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.free.arrangement import Arrangement
    from assigner.solver.problem import Problem


def looped_plans(
    problem: Problem, counts: Sequence[int], *, limit: float, nodes: int, stop: Callable[[], bool]
) -> Iterator[Plan]:
    """The best plan that is found with each micro-batch count, the counts of least bound first.

    Args:
        problem: What is to be placed, with one worker a stage.
        counts: Micro-batch counts.
        limit: No plan that takes so many seconds or more is looked for.
        nodes: So many nodes are looked at, all counts together.
        stop: True: the time is over.
    """
    if len(problem.workers) ** len(problem.order) > tuning.SMALL:
        return
    turns = []
    for count in counts:
        pricing = StepPricing(SetMemory(SetPrices(problem, count)), one_stage=False)
        bound, _ = pricing.least([-1] * len(problem.order), [0] * len(problem.workers), 0.0)
        if bound < limit:
            turns.append((bound, count, pricing))
    for bound, _, pricing in sorted(turns, key=lambda each: each[:2]):
        if stop() or bound >= limit:
            return
        found: list[Arrangement] = []
        Exhaustive(pricing, limit=limit, take=_taker(found), nodes=nodes // len(turns), stop=stop).run()
        if found:
            limit = found[-1].value_s
            yield found[-1].plan("interleaved")


def _taker(found: list[Arrangement]) -> Callable[[Arrangement], float]:
    def take(better: Arrangement) -> float:
        found.append(better)
        return better.value_s

    return take
