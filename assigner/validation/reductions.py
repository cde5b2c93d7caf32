"""All-reduces corrected by the reductions of a run: those of workers that share a stage.

What a reduction took, from when all of its workers had begun it, beside what the profile says of it: an all-reduce
among these workers takes so many times as long. One that nobody has measured is added, as the profile prices it with
that factor, so that the price of other workers' reductions stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from assigner.formats.profile import Collective, LinkPoint
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.rings import BUCKET_BYTES
from assigner.schedule.timing import compute_s

if TYPE_CHECKING:
    from assigner.formats.profile import Profile
    from assigner.validation.comparison import Agreement

_SIZES = (BUCKET_BYTES / 16, BUCKET_BYTES)
"""Bytes of an all-reduce that is added: of a whole bucket, and of less."""

SeenReductions = dict[frozenset[str], float]
"""By the workers of shared stages, how many times as long as predicted their reductions took."""


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
    """The profile's all-reduces, as a run found them.

    Args:
        profile: As of `reductions_seen`.
        seen: What `reductions_seen` says of it.
    """
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
