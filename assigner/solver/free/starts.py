"""Where the search for placements of any shape starts: pipelines along several orders of the graph, and loops.

A branched graph has many topological orders, and stages that are intervals of one are not intervals of another:

    a -> b1 -> b2 -> d        by layers    a b1 c1 b2 c2 d    a stage holds pieces of both branches
    a -> c1 -> c2 -> d        by branches  a b1 b2 c1 c2 d    each branch can have workers of its own

So the pipeline solver looks for a first plan along each of a few orders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.methods.candidate import SearchState
from assigner.solver.pipelines.gpipe import GPipeCandidate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.free.pricing import Stages
    from assigner.solver.problem.prices import PriceTable
    from assigner.solver.problem.problem import Problem


def starts(state: SearchState, table: PriceTable, *, loops: bool) -> Iterator[Stages]:
    """Placements worth a look, some of which may not fit: plans known, pipelines where those soon end, and loops."""
    known = [*state.given, *([] if state.best is None else [state.best])]
    yield from (of_plan(table.problem, each.plan) for each in known)
    seconds = max(state.share_s / 4, 0.1)
    for order in orders(table) if table.intervals.visits <= tuning.KNOWN_VISITS or not known else ():
        ordered = replace(along(table.problem, order), clock=SolveClock(seconds, within=table.problem.clock))
        candidate = GPipeCandidate(SearchState(ordered, state.watch), table.micro_batches)
        candidate.state.candidates = [candidate]
        candidate.begin()
        if candidate.best is not None:
            yield of_plan(table.problem, candidate.best.plan)
    for times in (1, 2, 3) if loops else (1,):
        yield loop(table, times)


def of_plan(problem: Problem, plan: Plan) -> Stages:
    """A plan's stages as (worker, mask of positions)."""
    number = {worker.name: n for n, worker in enumerate(problem.workers)}
    return tuple(
        (number[stage.worker], sum(1 << problem.position[name] for name in stage.partitions)) for stage in plan.stages
    )


def along(problem: Problem, positions: Iterable[int]) -> Problem:
    """The problem along an order of its positions."""
    return problem.along(tuple(problem.order[i] for i in positions))


def orders(table: PriceTable) -> list[tuple[int, ...]]:
    """A few topological orders: the profile's, and branch by branch in two ways; those that differ."""
    n = len(table.problem.order)
    found = [tuple(range(n))]
    for backwards in (False, True):
        order = _by_branches(table, backwards=backwards)
        if order not in found:
            found.append(order)
    return found


def _by_branches(table: PriceTable, *, backwards: bool) -> tuple[int, ...]:
    """The order that follows a branch as far as it can before it takes the next (depth first)."""
    waits = [before.bit_count() for before in table.before]
    ready = [i for i, count in enumerate(waits) if not count]
    ready.sort(reverse=not backwards)
    order = []
    while ready:
        i = ready.pop()
        order.append(i)
        freed = []
        for j in range(i + 1, len(waits)):
            if table.behind[i] >> j & 1:
                waits[j] -= 1
                if not waits[j]:
                    freed.append(j)
        ready.extend(freed if backwards else reversed(freed))
    return tuple(order)


def loop(table: PriceTable, times: int) -> Stages:
    """The partitions in their order, in pieces of about equal work, dealt to all workers `times` times."""
    workers = [w for w, row in enumerate(table.prices) if any(row)]
    workers = workers[: table.most_workers]
    pieces = min(len(workers) * times, len(table.problem.order))
    work = table.least_s
    total, reached, masks = sum(work) or 1.0, 0.0, [0] * pieces
    for i, seconds in enumerate(work):
        masks[min(pieces - 1, int((reached + seconds / 2) / total * pieces))] |= 1 << i
        reached += seconds
    return tuple((workers[n % len(workers)], mask) for n, mask in enumerate(filter(None, masks)))
