"""Warm-up depths of a pipeline, first stage first: how many micro-batches each stage starts before its first backward.

In a chain they never grow from stage to stage: a stage that warms up deeper than the one in front of it would wait for
ever.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Depths = tuple[int, ...]


def falling(ranges: Sequence[range], most: int) -> Iterator[Depths]:
    """Every choice, one of each range, that never grows, and starts at `most` or less."""
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        if first <= most:
            yield from ((first, *rest) for rest in falling(ranges[1:], first))


def falling_count(ranges: Sequence[range], most: int) -> int:
    """How many choices `falling` gives."""
    ways = [1] * (most + 1)  # by the greatest depth that the next stage may have
    for allowed in reversed(ranges):
        ways = list(itertools.accumulate(ways[depth] if depth in allowed else 0 for depth in range(len(ways))))
    return ways[-1]


def fitting(policies: Iterable[Sequence[int]], ranges: Sequence[range]) -> Iterator[Depths]:
    """Each policy's depths, held to the ranges and never growing; those that cannot be are left out."""
    found: dict[Depths, None] = {}
    for depths in policies:
        held = (max(allowed.start, min(depth, allowed.stop - 1)) for depth, allowed in zip(depths, ranges, strict=True))
        found[tuple(itertools.accumulate(held, min))] = None
    for depths in found:
        if all(depth in allowed for depth, allowed in zip(depths, ranges, strict=True)):
            yield depths


def nearby(depths: Depths, ranges: Sequence[range]) -> Iterator[Depths]:
    """Depths that differ from the given ones by one stage made deeper or shallower, the nearest first.

    By 1, 2, 4, ...: one micro-batch more may change nothing where several do. Stages in front of it follow a deeper
    one, those behind it a shallower one.
    """
    widest = max((len(allowed) for allowed in ranges), default=0)
    changes = itertools.takewhile(lambda change: change < widest, (2**power for power in itertools.count()))
    moved = (
        (*(max(each, depths[n] + change) for each in depths[:n]), depths[n] + change,
         *(min(each, depths[n] + change) for each in depths[n + 1 :]))
        for size in changes for change in (size, -size) for n in range(len(depths))
    )  # fmt: skip
    return (each for each in fitting(moved, ranges) if each != depths)
