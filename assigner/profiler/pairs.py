"""Which pairs of workers are measured and when: all of them, or in a large fleet a sample of each class.

A pair's class is what its two workers are (device, threads, and the kinds of worker on their hosts) and whether they
share a host. Neighbours (rank and next rank) are measured in any case: most plans send along them.

Round-robin rounds: the circle method (T. P. Kirkman, 1847).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.profiler.host import HostFacts

Ranks = TypeVar("Ranks", bound=tuple[int, ...])
Pair = tuple[int, int]
"""Two ranks, the lower one first."""

ALL_UP_TO = 16
"""So many workers have all their links measured unless it is asked otherwise: 120 pairs."""

ALONE_UP_TO = 8
"""So many workers have their pairs measured one at a time where they would disturb each other: 28 pairs."""

_SAMPLE = 3


class Classes:
    """The classes of a fleet's pairs; the workers are by rank."""

    def __init__(self, facts: Sequence[HostFacts]) -> None:
        self.host = [(each.host, each.node) for each in facts]
        kinds = [(each.device.partition(":")[0], each.kind, each.threads) for each in facts]
        on_host: dict[Any, list[Any]] = defaultdict(list)
        for host, kind in zip(self.host, kinds, strict=True):
            on_host[host].append(kind)
        self.worker = [(kind, tuple(sorted(on_host[host]))) for host, kind in zip(self.host, kinds, strict=True)]

    def of(self, source: int, target: int) -> tuple[Any, Any, bool]:
        """The class of a directed link."""
        return self.worker[source], self.worker[target], self.host[source] == self.host[target]


def tournament(workers: int) -> list[list[Pair]]:
    """Rounds of pairs in which every two of `workers` meet once, and nobody is in two pairs of a round."""
    seats: list[int | None] = [*range(workers)] + ([None] if workers % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        rounds.append(sorted(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def ring(workers: int) -> list[Pair]:
    """Every worker with the next one, and the last with the first."""
    return sorted({(min(a, b), max(a, b)) for a, b in ((n, (n + 1) % workers) for n in range(workers)) if a != b})


def sampled_pairs(facts: Sequence[HostFacts]) -> list[Pair]:
    """The neighbours, and three pairs or more of every class, spread over the workers."""
    classes, workers = Classes(facts), len(facts)
    chosen = dict.fromkeys(ring(workers))
    busy = Counter(rank for pair in chosen for rank in pair)
    found = Counter(_undirected(classes, pair) for pair in chosen)
    waiting: dict[Any, list[Pair]] = defaultdict(list)
    for pair in (pair for each in tournament(workers) for pair in each if pair not in chosen):
        waiting[_undirected(classes, pair)].append(pair)
    for name, pairs in waiting.items():
        while pairs and found[name] < _SAMPLE:
            pair = min(pairs, key=lambda pair: max(busy[pair[0]], busy[pair[1]]))
            pairs.remove(pair)
            chosen[pair] = None
            busy.update(pair)
            found[name] += 1
    return list(chosen)


def is_sampled(workers: int, pairs: str) -> bool:
    """Whether some pairs stand for the others; `pairs`: "all", "sampled" or "auto"."""
    return pairs == "sampled" or (pairs == "auto" and workers > ALL_UP_TO)


def reduced_sets(facts: Sequence[HostFacts], pairs: str, named: Iterable[Pair] = ()) -> list[tuple[int, ...]]:
    """The sets of ranks whose all-reduces are measured: some pairs, and all ranks together, the smallest sets first.

    On every host, and between every two hosts, one pair of each two kinds of workers; where links are sampled, one of
    each class; and those that are named.
    """
    classes, chosen = Classes(facts), dict[Any, Pair]()
    if is_sampled(len(facts), pairs):
        for pair in sampled_pairs(facts):
            chosen.setdefault(_undirected(classes, pair), pair)
    else:
        for pair in itertools.combinations(range(len(facts)), 2):
            ends = tuple(sorted((classes.host[rank], classes.worker[rank][0]) for rank in pair))
            chosen.setdefault(ends, pair)
    found = sorted({*chosen.values(), *named})
    return [*found, tuple(range(len(facts)))] if len(facts) > 2 else [*found]


def _undirected(classes: Classes, pair: Pair) -> frozenset[Any]:
    return frozenset((classes.of(*pair), classes.of(pair[1], pair[0])))


def rounds_of(sets: Iterable[Ranks]) -> list[list[Ranks]]:
    """Some sets of ranks in rounds, each rank in one set of a round at most: first fit."""
    rounds: list[list[Ranks]] = []
    for ranks in sets:
        fitting = (each for each in rounds if set(ranks).isdisjoint(itertools.chain(*each)))
        place = next(fitting, None)
        if place is None:
            rounds.append([ranks])
        else:
            place.append(ranks)
    return rounds
