"""Links corrected by the messages of a run, and all-reduces by its reductions.

A link whose messages were waited for takes as long as it took them: at the sizes that were seen it says what was
measured, its other points are scaled as the sizes nearest to them. Beyond all of them it goes on as it was profiled,
scaled: a line through two sizes that lie close together would be noise. Its busy shares are such that its workers lose
after their actions what they were seen to lose: scaled, or where the profile has none, in proportion to the messages.

What a reduction took, from when all of its workers had begun it, beside what the profile says of it: an all-reduce
among these workers takes so many times as long. One that nobody has measured is added, as the profile prices it with
that factor, so that the price of other workers' reductions stays.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from assigner.formats.profile import Collective, LinkPoint
from assigner.samples import Samples
from assigner.schedule.cost import CostModel, message_s
from assigner.schedule.program import ActionKind, wire
from assigner.schedule.rings import BUCKET_BYTES, factor_at
from assigner.schedule.timing import compute_s, route_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.formats.profile import Link, Profile
    from assigner.validation.comparison import Agreement

_BEYOND = 2.0
"""How far beyond the largest size that was seen a point says how a link goes on: any factor gives the same line."""

SeenFlights = dict[tuple[str, str], dict[float, Samples]]
"""Of each link, by message size in bytes, the flights that were seen."""
_SIZES = (BUCKET_BYTES / 16, BUCKET_BYTES)
"""Bytes of an all-reduce that is added: of a whole bucket, and of less."""

SeenReductions = dict[frozenset[str], float]
"""By the workers of shared stages, how many times as long as predicted their reductions took."""


def corrected_links(profile: Profile, agreement: Agreement, seen: SeenFlights) -> tuple[Link, ...]:
    """The profile's links, as a run found them.

    Args:
        profile: What the plan was priced with.
        agreement: The plan beside the trace of its run.
        seen: What `flights_seen` says of it.
    """
    timed = tuple(corrected_link(link, seen.get((link.source, link.target), {})) for link in profile.links)
    found = _losses(replace(profile, links=timed), agreement)
    return tuple(replace(link, **found.get((link.source, link.target), {})) for link in timed)


def flights_seen(agreement: Agreement) -> SeenFlights:
    """The flights on each link by message size; those that the clocks cannot tell from nothing are left out."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in agreement.routes:
        flights = agreement.observed.flights.get(each.route)
        if flights is not None and flights.median_s > 2 * agreement.clock_error_s:
            found[each.route.source, each.route.target][each.bytes] += flights.seconds
    return {
        link: {size: Samples(tuple(seconds)) for size, seconds in sorted(sizes.items())}
        for link, sizes in found.items()
    }


def factors(link: Link, seen: Mapping[float, Samples]) -> list[tuple[float, float]]:
    """By size, how many times as long as profiled a message took."""
    said = {size: message_s(link.points, size) for size in seen}
    return [(size, samples.median_s / said[size]) for size, samples in seen.items() if said[size] > 0]


def corrected_link(link: Link, seen: Mapping[float, Samples]) -> Link:
    """A link whose points are scaled as the sizes nearest to them, with a point at each size that was seen."""
    found = factors(link, seen)
    if not found:
        return link
    points = {
        point.bytes: replace(point, seconds=point.seconds * factor_at(found, point.bytes)) for point in link.points
    }
    for size, samples in seen.items():
        points[size] = LinkPoint.of(size, samples)
    (largest, factor), last = found[-1], link.points[-1]
    if largest > last.bytes:
        beyond = _BEYOND * largest
        points[beyond] = replace(last, bytes=beyond, seconds=factor * message_s(link.points, beyond))
    return replace(link, points=tuple(points[size] for size in sorted(points)))


def _losses(profile: Profile, agreement: Agreement) -> dict[_Ends, dict[str, Any]]:
    """Of each link whose messages hang on a traced action the fields that say what its sender and receiver lose."""
    plan, cost = agreement.plan, CostModel(profile)
    wiring = wire(plan, profile.edges, profile.ties)
    found: dict[_Ends, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    actions = itertools.product(range(len(wiring.lanes)), range(len(plan.stages)), _TIMED)
    for lane, n, kind in actions:
        lost = agreement.observed.behind.get((kind, n, wiring.lanes[lane].workers[n]))
        before, behind = wiring.around(kind, lane, n)
        moved = [(route, "receiver", 1) for route in before]
        moved += [(route, "sender", 0) for route in behind]
        if lost is None or not moved:
            continue
        sizes = [(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size)) for route, _, _ in moved]
        said = sum(cost.busy_s(*size)[end] for size, (_, _, end) in zip(sizes, moved, strict=True))
        whole = sum(cost.transfer_s(*size) for size in sizes)
        for route, end, _ in moved:
            link = profile.link[route.source, route.target]
            share, fixed = getattr(link, f"{end}_busy"), getattr(link, f"{end}_s")
            mine = found[route.source, route.target]
            if said > 0:
                mine[f"{end}_busy"].append(min(1.0, share * lost.median_s / said))
                mine[f"{end}_s"].append(fixed * lost.median_s / said)
            elif whole > 0:
                mine[f"{end}_busy"].append(min(1.0, lost.median_s / whole))
    return {ends: {name: median(values) for name, values in mine.items()} for ends, mine in found.items()}


_TIMED = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT
_Ends = tuple[str, str]


def reductions_seen(profile: Profile, agreement: Agreement) -> SeenReductions:
    """What a run says of reductions; those that it has not timed are left out.

    Args:
        profile: With links, and all-reduces over them, that are corrected.
        agreement: The plan beside the trace of its run.
    """
    plan, cost, found = agreement.plan, CostModel(profile), defaultdict[frozenset[str], list[float]](list)
    for n, stage in enumerate(plan.stages):
        for worker in stage.workers:
            key = (ActionKind.REDUCE, n, worker)
            samples = agreement.observed.compute.get(key) if stage.replicas else None
            said = compute_s(cost, plan, key) if samples is not None else 0.0
            if samples is not None and 0 < said < math.inf and samples.median_s > 2 * agreement.clock_error_s:
                found[frozenset(stage.workers)].append(samples.median_s / said)
    return {workers: median(ratios) for workers, ratios in found.items()}


def corrected_collectives(profile: Profile, seen: SeenReductions) -> tuple[Collective, ...]:
    """The profile's all-reduces, as a run found them: what `reductions_seen` says of this profile."""
    known = tuple(_times(each, seen.get(frozenset(each.workers), 1.0)) for each in profile.collectives)
    measured, cost = {frozenset(each.workers) for each in known}, CostModel(profile)
    added = (_added(cost, workers, factor) for workers, factor in seen.items() if workers not in measured)
    return (*known, *added)


def _times(collective: Collective, factor: float) -> Collective:
    points = (replace(point, seconds=point.seconds * factor) for point in collective.points)
    return replace(collective, points=tuple(points))


def _added(cost: CostModel, workers: frozenset[str], factor: float) -> Collective:
    names = tuple(sorted(workers, key=lambda name: cost.profile.worker[name].rank))
    points = tuple(LinkPoint(size, factor * cost.rings.seconds(workers, size), 0) for size in _SIZES)
    return Collective(names, points, cost.rings.backend(workers), cost.rings.busy_share(workers))
