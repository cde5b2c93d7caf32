"""Local search, one for all candidates: from a point to a better neighbour, as long as there is one and room to look.

What a point is, which neighbours it has and what it is worth, the candidate says. Pipelines have the moves below; the
warm-up depths of one pipeline those of `nearby` (pipelines/simulated.py); placements of any shape those of
`free/annealing.py`, which also accepts a worse neighbour now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from assigner.solver.limits.tuning import ROUNDING, TIE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Point = TypeVar("Point")

Intervals = tuple[tuple[int, int], ...]
"""A pipeline: (start, number of who has it) of each stage in order; the number is of a group, or of a replica set."""


def is_better(value: float, than: float) -> bool:
    """Whether a value is lower by more than rounding."""
    return value < than * (1 - ROUNDING)


def local_search(
    start: Point, value: float, *, neighbours: Callable[[Point], Iterable[Point]], price: Callable[[Point], float],
    may_go_on: Callable[[], bool], accept: Callable[[float, float], bool] = is_better,
) -> tuple[Point, float]:  # fmt: skip
    """The best point met on the way from `start`, and its value.

    Args:
        start: Where to begin.
        value: What that is worth; lower is better.
        neighbours: Of a point, in the order in which they are tried.
        price: What a point is worth; inf: it cannot be.
        may_go_on: Asked before each neighbour; counts, or looks at the clock.
        accept: Whether to go to a neighbour of the first value from a point of the second.
    """
    best, here, at = (start, value), value, start
    moved = True
    while moved:
        moved = False
        for point in neighbours(at):
            if not may_go_on():
                return best
            found = price(point)
            if accept(found, here):
                at, here, moved = point, found, True
                if here < best[1] * (1 - TIE):
                    best = at, here
                break
    return best


def pipeline_moves(
    stages: Intervals, n: int, sizes: tuple[int, ...], sets: Sequence[tuple[int, ...]]
) -> Iterator[Intervals]:
    """Pipelines of n positions one step away: a boundary moved, workers swapped or taken, stages merged or split.

    `sizes` has the workers of each group, `sets` who may have a stage, each as the groups of its workers.
    """
    count = len(stages)
    taken = [group for _, number in stages for group in sets[number]]
    left = [size - taken.count(group) for group, size in enumerate(sizes)]
    free = _free(sets, left, ())
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
        for group in _free(sets, left, sets[stages[s][1]]):
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


def _free(sets: Sequence[tuple[int, ...]], left: Sequence[int], own: tuple[int, ...]) -> list[int]:
    """The sets of workers of which so many are left, those of one set among them."""
    return [
        k
        for k, members in enumerate(sets)
        if all(members.count(group) <= left[group] + own.count(group) for group in members)
    ]


def _put(stages: Intervals, s: int, stage: tuple[int, int]) -> Intervals:
    return (*stages[:s], stage, *stages[s + 1 :])
