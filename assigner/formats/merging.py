"""Profiles put together: workers that were measured apart in one, or new figures in place of old ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError
from assigner.formats.document import shown
from assigner.formats.profilewarnings import other_warnings, outdated, with_warnings
from assigner.location import Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.formats.profile import Collective, Link, Measurement, Partition, Profile, Wire, WorkloadReference

_CALIBRATED = ("calibrated", "not calibrated")
_RANK = re.compile(r"\bworker:(\d+)")


def merged(profiles: Sequence[tuple[str, Profile]]) -> Profile:
    """One profile with the workers of several, given with their names for errors; no link leads between those of two.

    The first keeps its ranks, the others' follow: `worker:0` of the second becomes `worker:N` behind N workers. So do
    the names in their links, wires, collectives, measurements, pins and warnings.

    Raises:
        FormatError: they were not measured of the same workload.
    """
    (first_name, whole), *others = profiles
    warnings, kinds = list(other_warnings(whole)), {each.name: each.kind for each in whole.partitions}
    for name, other in others:
        check_same_workload(whole.workload, kinds, other, names=(first_name, name))
        added = _renumbered(other, 1 + max(worker.rank for worker in whole.workers))
        partitions, unlike = _pinned(whole.partitions, other.partitions, added.partitions)
        warnings += [*other_warnings(added), *(f"{text} in {name}; not used" for text in unlike)]
        whole = replace(
            whole,
            workers=whole.workers + added.workers,
            links=whole.links + added.links,
            wires=whole.wires + added.wires,
            collectives=whole.collectives + added.collectives,
            partitions=partitions,
            measurements=whole.measurements + added.measurements,
        )
    return with_warnings(whole, warnings)


def updated(
    old: Profile,
    *,
    measurements: Iterable[Measurement],
    links: Iterable[Link],
    wires: Iterable[Wire] = (),
    collectives: Iterable[Collective] = (),
    notes: Iterable[str] = (),
    created_at: str,
) -> Profile:
    """A profile with new figures: each replaces that of the same kind of partition, worker and micro-batch, or link.

    What was said of the replaced figures goes with them. A calibration is on record as long as one of its figures is.

    New wires replace all that were known where there are new links: whenever links are measured, all are looked at.
    `notes` are new warnings besides those that the figures give.
    """

    def key(each: Measurement) -> tuple[str, str, int]:
        return old.partition[each.partition].kind, each.worker, each.micro_batch

    points, ways = list(measurements), {(link.source, link.target): link for link in links}
    sets = {frozenset(each.workers): each for each in collectives}
    replaced = {key(each) for each in points}
    kept = tuple(each for each in old.measurements if key(each) not in replaced)
    new = replace(
        old,
        created_at=created_at,
        measurements=(*kept, *points),
        links=(
            *(ways.get(way, link) for way, link in old.link.items()),
            *(link for way, link in ways.items() if way not in old.link),
        ),
        wires=tuple(wires) if ways else old.wires,
        collectives=(
            *(each for each in old.collectives if frozenset(each.workers) not in sets),
            *sets.values(),
        ),
    )
    gone = [(each.partition, each.worker, each.micro_batch) for each in old.measurements if key(each) in replaced]
    workers = set(old.worker) - {each.worker for each in kept}
    said = [text for text in other_warnings(old) if not outdated(text, points=gone, workers=workers, links=ways)]
    if not kept and old.link.keys() <= ways.keys():
        said = [text for text in said if not text.startswith(_CALIBRATED)]
        new = replace(new, environment={name: value for name, value in old.environment.items() if name != "calibrated"})
    return with_warnings(new, (*said, *notes))


def check_same_workload(
    here: WorkloadReference, kinds: Mapping[str, str], other: Profile, *, names: tuple[str, str]
) -> None:
    """Refuse figures of another workload, or of other partitions: fingerprints may be written by hand.

    `kinds` has the kinds of the partitions of `here`, `names` what an error calls the two.

    Raises:
        FormatError: naming what differs, or a partition that only one of them has, or that is of another kind.
    """
    for what in ("fingerprint", "batch_size", "dtype", "optimizer", "max_micro_batches", "min_rows"):
        ours, theirs = getattr(here, what), getattr(other.workload, what)
        if ours != theirs:
            raise FormatError(
                f"{names[1]} was measured of another workload than {names[0]}: its {what} is {shown(theirs)}, not"
                f" {shown(ours)}",
                hint="profile the same model with the same marks, batch size and optimizer in both places",
            )
    found = {each.name: each.kind for each in other.partitions}
    if found != kinds:
        unlike = sorted(set(kinds.items()) ^ set(found.items()))[0][0]
        raise FormatError(f"{names[1]} has other partitions than {names[0]}: they differ in {unlike!r}")


def _renumbered(profile: Profile, offset: int) -> Profile:
    """The same with every rank moved up by `offset`."""

    def name(worker: str) -> str:
        place = Location.parse(worker)
        return str(Location(place.rank + offset, place.device))

    def way(link: Any) -> Any:
        return replace(link, source=name(link.source), target=name(link.target))

    def text(said: str) -> str:
        return _RANK.sub(lambda match: f"worker:{int(match[1]) + offset}", said)

    return replace(
        profile,
        workers=tuple(replace(each, name=name(each.name)) for each in profile.workers),
        links=tuple(map(way, profile.links)),
        wires=tuple(replace(wire, links=tuple(map(way, wire.links))) for wire in profile.wires),
        collectives=tuple(replace(each, workers=tuple(map(name, each.workers))) for each in profile.collectives),
        partitions=tuple(replace(each, pin=each.pin and text(each.pin)) for each in profile.partitions),
        measurements=tuple(replace(each, worker=name(each.worker)) for each in profile.measurements),
        warnings=tuple(text(each) for each in profile.warnings),
    )


def _pinned(
    ours: Sequence[Partition], theirs: Sequence[Partition], moved: Sequence[Partition]
) -> tuple[tuple[Partition, ...], list[str]]:
    """Our partitions, with the others' pins where we have none, and what the others pin elsewhere.

    A pin to a rank that stands in both is the model's own and means the rank of a run: ours.
    `moved` are theirs with the ranks renumbered.
    """
    said = {each.name: each.pin for each in theirs}
    pins = {each.name: each.pin for each in moved}
    unlike = [
        f"{each.name} is pinned to {each.pin}, and to {said[each.name]}"
        for each in ours
        if each.pin and said[each.name] not in (None, each.pin)
    ]
    return tuple(replace(each, pin=each.pin or pins[each.name]) for each in ours), unlike
