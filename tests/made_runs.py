"""Runs that never were: a plan simulated in the truth, and the trace that such a run would write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from builders import worker_name

from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated
from assigner.validation.observed import rehearsed

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.trace import Trace


def run_in(truth: Profile, plan: Plan, *, steps: int = 3) -> Trace:
    """What a run of the plan takes where `truth` holds."""
    cost = CostModel(truth)
    return rehearsed(simulated(plan, cost), cost, steps=steps)


def slower_worker(profile: Profile, rank: int, *, forward: float = 1.0, backward: float = 1.0) -> Profile:
    """A worker takes so many times as long as measured."""
    return replace(
        profile,
        measurements=tuple(
            replace(each, forward_s=forward * each.forward_s, backward_s=backward * each.backward_s)
            if each.worker == worker_name(rank)
            else each
            for each in profile.measurements
        ),
    )


def slower_link(profile: Profile, source: int, target: int, factor: float) -> Profile:
    """A directed link takes so many times as long as measured."""
    return replace(
        profile,
        links=tuple(
            replace(link, points=tuple(replace(point, seconds=factor * point.seconds) for point in link.points))
            if (link.source, link.target) == (worker_name(source), worker_name(target))
            else link
            for link in profile.links
        ),
    )


def with_busy(profile: Profile, share: float) -> Profile:
    """Messages keep both their ends busy for this share of their time."""
    return replace(
        profile, links=tuple(replace(link, sender_busy=share, receiver_busy=share) for link in profile.links)
    )  # fmt: skip
