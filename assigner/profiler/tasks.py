"""What the ranks agree on before they measure: who measures what, given what each has already.

Every rank works it out from the same offers, and so comes to the same answer. All workers measure at the same time,
because they compute at the same time in training too, and hosts may share more than is seen of them: virtual ones a
processor, those of the lab its caches. What one of them needs the others run as well, and keep their own figure where
they have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import FormatError, UsageError
from assigner.profiler.host import HostFacts, worker_names
from assigner.profiler.options import Links
from assigner.profiler.pairs import reduced_sets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.profiler.options import Selection


@dataclass(frozen=True, order=True)
class Point:
    """A partition that stands for its kind, at a micro-batch size."""

    partition: str
    micro_batch: int


@dataclass(frozen=True)
class Start:
    """What rank 0 says first."""

    micro_batches: tuple[int, ...] = ()  # sizes to measure
    workers: tuple[str, ...] = ()  # of the profile that is updated, in words; empty: none is
    updates: str = ""  # when that was made
    refused: str | None = None  # why the run cannot be
    usage: bool = False  # that is the command line's fault, and not a file's
    hint: str | None = None  # what to do about it
    # what is measured at all; so, and in what follows, rank 0's command line is every rank's
    only: tuple[str, ...] = ()
    isolated: bool = False  # one worker at a time
    links: Links = "auto"  # which links are measured


@dataclass(frozen=True)
class RankState:
    """What a rank has: its worker, its model's fingerprint, and what is measured already.

    `targets` are of links that start at it, `collectives` the sets of ranks of which it is the first; `refused` is why
    it cannot go on.
    """

    facts: HostFacts
    fingerprint: str
    points: tuple[Point, ...] = ()
    targets: tuple[int, ...] = ()
    collectives: tuple[tuple[int, ...], ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Task:
    """What one rank is to do."""

    keep: frozenset[Point]  # points that it measures for the profile
    run: tuple[Point, ...]  # points that it runs: those, and what other workers measure
    links: frozenset[tuple[int, int]]  # links to measure, of all ranks, as (source, target)
    collectives: tuple[tuple[int, ...], ...] = ()  # sets of ranks whose all-reduces are to be measured, in this order


class RefusedError(FormatError):
    """All ranks refuse alike, and one of a host's ranks says so; `usage`: the command line's fault, and no file's."""

    def __init__(self, message: str, *, hint: str | None = None, usage: bool = False) -> None:
        super().__init__(message, hint=hint)
        if usage:
            self.exit_code = UsageError.exit_code


def describe(name: str, kind: str, threads: int) -> str:
    """A worker in words: what must be the same for its figures to be of use."""
    return f"{name} ({kind}, {threads} thread{'s' if threads > 1 else ''})"


def check_states(start: Start, offers: Sequence[RankState]) -> None:
    """Refuse what cannot become one profile.

    Raises:
        RefusedError: a rank refused, the ranks have different models, or not the workers of the updated profile.
    """
    if start.refused is not None:
        raise RefusedError(start.refused, hint=start.hint, usage=start.usage)
    refused = next((offer.refused for offer in offers if offer.refused is not None), None)
    if refused is not None:
        raise RefusedError(refused)
    for rank, offer in enumerate(offers):
        if offer.fingerprint != offers[0].fingerprint:
            raise RefusedError(
                f"worker:{rank} has another model than worker:0",
                hint="the same files and versions belong on every host",
            )
    if start.workers:
        fleet = [offer.facts for offer in offers]
        here = [
            describe(name, facts.kind, facts.threads) for name, facts in zip(worker_names(fleet), fleet, strict=True)
        ]
        if len(here) != len(start.workers):
            raise RefusedError(f"the profile has {len(start.workers)} workers, and the run has {len(here)} ranks")
        unlike = next((pair for pair in zip(start.workers, here, strict=True) if pair[0] != pair[1]), None)
        if unlike is not None:
            raise RefusedError(
                f"the profile's {unlike[0]} is {unlike[1]} in this run",
                hint="measure on the same workers, in the same order, with the same --threads",
            )


def assign_tasks(
    offers: Sequence[RankState],
    rank: int,
    *,
    kinds: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    selection: Selection,
    isolated: bool,
    links: Links = "auto",
) -> Task:
    """This rank's task.

    `offers` is what each rank has; `kinds` has the partition that stands for each kind, with all partitions of it.
    Isolated, with one worker at a time, nobody keeps another one company.
    """

    def missing(of: int) -> list[Point]:
        has = set(offers[of].points)
        names = [name for name, alike in kinds.items() if selection.point(alike, of)]
        return [point for point in (Point(name, size) for name in names for size in sizes) if point not in has]

    ranks = range(len(offers))
    needed = {point for each in ranks if each == rank or not isolated for point in missing(each)}
    has = {each for offer in offers for each in offer.collectives}
    sets = reduced_sets([offer.facts for offer in offers], links, selection.pairs())
    return Task(
        frozenset(missing(rank)),
        tuple(point for point in (Point(name, size) for name in kinds for size in sizes) if point in needed),
        frozenset(
            (a, b)
            for a in ranks
            for b in ranks
            if a != b and selection.link(a, b) and b not in offers[a].targets
        ),
        tuple(each for each in sets if selection.collective(each) and each not in has),
    )  # fmt: skip
