"""Every way in which workers can share the micro-batches of a stage, within a threshold.

A worker carries so many micro-batches as it can end by then. Which of them it takes follows from the shares and from
the order in which a plan names the workers (`schedule/replication.py`): ways that give each kind of worker the same
ones are one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from assigner.schedule.replication import takes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Sharing(NamedTuple):
    """The groups of the workers in the order in which a plan names them, and how many micro-batches each takes."""

    named: tuple[int, ...]
    shares: tuple[int, ...]


def sharings(members: Sequence[int], most: Mapping[int, int], micro_batches: int) -> Iterator[Sharing]:
    """Each way once.

    Args:
        members: The groups of the workers that share the stage.
        most: Of each group, how many micro-batches one of its workers carries.
        micro_batches: M; each worker takes one or more.
    """
    seen = set()
    for named in sorted(set(itertools.permutations(members))):
        for shares in _shares([most[group] for group in named], micro_batches):
            taken = _told_apart(named, takes(micro_batches, shares))
            if taken not in seen:
                seen.add(taken)
                yield Sharing(named, shares)


def _shares(most: Sequence[int], left: int) -> Iterator[tuple[int, ...]]:
    """Every way to share `left` among workers that each take one or more, and no more than they carry."""
    if len(most) == 1:
        if 1 <= left <= most[0]:
            yield (left,)
        return
    rest = most[1:]
    for share in range(max(1, left - sum(rest)), min(most[0], left - len(rest)) + 1):
        yield from ((share, *others) for others in _shares(rest, left - share))


def _told_apart(named: Sequence[int], taken: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Who takes each micro-batch, where like workers are numbered as they come."""
    numbers: dict[int, tuple[int, int]] = {}
    seen: Counter[int] = Counter()
    for worker in taken:
        if worker not in numbers:
            group = named[worker]
            numbers[worker] = group, seen[group]
            seen[group] += 1
    return tuple(numbers[worker] for worker in taken)
