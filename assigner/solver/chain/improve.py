"""Local search around a pipeline: move a boundary, swap two workers, take another worker, merge, split.

It sharpens the beam's plans; of graphs, whose price is the simulator's, it is what finds them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from assigner.solver.chain.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.solver.segments import Column

Stages = tuple[tuple[int, int], ...]
"""(start, group) of each stage in order."""


ACTIONS = 60_000
"""Of a graph, so many simulated actions of workers: about a second. Counted, not timed: the same answer every time."""


def improve(placement: Placement, *, until: float) -> Placement:
    """The best pipeline that single moves lead to.

    Args:
        placement: Where to start.
        until: A time of `time.monotonic` at which to stop whatever is found.
    """
    instance, best = placement.instance, placement
    tries = 50_000 if instance.problem.exact else ACTIONS // (2 * instance.micro_batches * len(placement.columns))
    tried: set[Stages] = set()
    improved = True
    while improved:
        improved = False
        for stages in moves(_stages(best.columns), len(instance.problem.order), _sizes(best)):
            if stages in tried:
                continue
            tried.add(stages)
            if time.monotonic() > until or tries <= 0:
                return best
            columns = _columns(best, stages)
            if columns is not None and len(columns) <= instance.problem.most_workers:
                tries -= 1
                found = Placement.of(instance, columns)
                if found.step_s < best.step_s * (1 - 1e-9):
                    best, improved = found, True
                    break
    return best


def _stages(columns: Sequence[Column]) -> Stages:
    return tuple((column.first, column.group) for column in columns)


def _sizes(placement: Placement) -> tuple[int, ...]:
    return tuple(len(group) for group in placement.instance.groups)


def _columns(placement: Placement, stages: Stages) -> tuple[Column, ...] | None:
    ends = [start for start, _ in stages[1:]] + [len(placement.instance.problem.order)]
    found = [
        placement.instance.columns.get((start, end - 1, group))
        for (start, group), end in zip(stages, ends, strict=True)
    ]
    whole = tuple(column for column in found if column is not None)
    return whole if len(whole) == len(found) else None


def moves(stages: Stages, n: int, sizes: tuple[int, ...]) -> Iterator[Stages]:
    """Pipelines one step away: a boundary moved, workers swapped or taken, stages merged or split."""
    count = len(stages)
    used = [sum(group == k for _, group in stages) for k in range(len(sizes))]
    free = [k for k, size in enumerate(sizes) if used[k] < size]
    ends = [start for start, _ in stages[1:]] + [n]
    for s in range(1, count):  # move a boundary
        low, high, at = stages[s - 1][0] + 1, ends[s] - 1, stages[s][0]
        for start in sorted(range(low, high + 1), key=lambda start: (abs(start - at), start)):
            if start != at:
                yield _put(stages, s, (start, stages[s][1]))
    for s in range(count):  # swap two workers, or take a free one
        for t in range(s + 1, count):
            if stages[s][1] != stages[t][1]:
                yield _put(_put(stages, s, (stages[s][0], stages[t][1])), t, (stages[t][0], stages[s][1]))
        for group in free:
            if group != stages[s][1]:
                yield _put(stages, s, (stages[s][0], group))
    for s in range(1, count):  # merge with the stage before, on either worker
        yield stages[:s] + stages[s + 1 :]
        yield (*stages[: s - 1], (stages[s - 1][0], stages[s][1]), *stages[s + 1 :])
    for s in range(count):  # split, with a free worker in front or behind
        for start in range(stages[s][0] + 1, ends[s]):
            for group in free:
                yield (*stages[: s + 1], (start, group), *stages[s + 1 :])
                yield (*stages[:s], (stages[s][0], group), (start, stages[s][1]), *stages[s + 1 :])


def _put(stages: Stages, s: int, stage: tuple[int, int]) -> Stages:
    return (*stages[:s], stage, *stages[s + 1 :])
