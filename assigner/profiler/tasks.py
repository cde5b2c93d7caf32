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
    """What rank 0 says first.

    Args:
        micro_batches: Sizes to measure.
        workers: Of the profile that is updated, in words; empty: none is.
        updates: When that was made.
        refused: Why the run cannot be.
        usage: That is the command line's fault, and not a file's.
        hint: What to do about it.
        only: What is measured at all; so, and in what follows, rank 0's command line is every rank's.
        isolated: One worker at a time.
        links: Which links are measured.
    """

    micro_batches: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    updates: str = ""
    refused: str | None = None
    usage: bool = False
    hint: str | None = None
    only: tuple[str, ...] = ()
    isolated: bool = False
    links: Links = "auto"


@dataclass(frozen=True)
class RankState:
    """What a rank has.

    Args:
        facts: Its worker.
        fingerprint: Of its model.
        points: Measured already.
        targets: Links that start at it and are measured already.
        collectives: Sets of ranks of which it is the first, and whose all-reduces are measured already.
        refused: Why it cannot go on.
    """

    facts: HostFacts
    fingerprint: str
    points: tuple[Point, ...] = ()
    targets: tuple[int, ...] = ()
    collectives: tuple[tuple[int, ...], ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Task:
    """What one rank is to do.

    Args:
        keep: Points that it measures for the profile.
        run: Points that it runs: those, and what other workers measure.
        links: Links to measure, of all ranks, as (source, target).
        collectives: Sets of ranks whose all-reduces are to be measured, in this order.
    """

    keep: frozenset[Point]
    run: tuple[Point, ...]
    links: frozenset[tuple[int, int]]
    collectives: tuple[tuple[int, ...], ...] = ()


class RefusedError(FormatError):
    """All ranks refuse alike; one of a host's ranks says so.

    Args:
        message: Why.
        hint: What to do.
        usage: The command line is at fault, and not a file.
    """

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

    Args:
        offers: What each rank has.
        rank: This one.
        kinds: The partition that stands for each kind, with all partitions of it.
        sizes: Micro-batch sizes.
        selection: What is to be measured at all.
        isolated: One worker at a time: nobody keeps company.
        links: Which links are measured.
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
