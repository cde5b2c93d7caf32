"""What an allocator takes beyond the tensors in it: part of every peak, and of what a worker has room for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_profile

from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

SHARE = 0.25


def with_share(profile: Profile, share: float, memory: float) -> Profile:
    workers = tuple(replace(each, allocator_share=share, memory_bytes=memory) for each in profile.workers)
    return replace(profile, workers=workers)


@pytest.fixture(scope="module")
def tight() -> Profile:
    """Six partitions on two workers of unlike speed; the fast one would take all, were there room."""
    return make_profile(work=[2e-3] * 6, slowness=[1, 3], activation=4e6, parameters=2e6, batch=8)


def test_a_peak_holds_the_allocators_share() -> None:
    """A share of a quarter makes the peak a quarter larger, all of it in the workspace."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1])
    stages = [(profile.order, profile.order[:1], 4)]
    bare, more = (
        CostModel(with_share(profile, share, 1e9)).memory("worker:0/cpu", stages, 2) for share in (0.0, SHARE)
    )
    assert more.total == pytest.approx((1 + SHARE) * bare.total)
    assert replace(more, workspace=bare.workspace) == bare


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("memory", [70e6, 90e6, 130e6, 400e6])
def test_a_share_of_the_allocator_is_a_smaller_worker(tight: Profile, schedule: str, memory: float) -> None:
    """The plan is the one for workers whose memory is smaller by the share, and it fits as it is predicted."""
    options = SolveOptions(schedule=schedule, gap=0.0)
    found = solve(with_share(tight, SHARE, memory * (1 + SHARE)), options).plan
    like = solve(with_share(tight, 0.0, memory), options).plan
    assert found.predicted is not None
    assert like.predicted is not None
    assert found.predicted.step_s == pytest.approx(like.predicted.step_s)
    assert not overfull(found.predicted)
    assert not overfull(predict(found, with_share(tight, SHARE, memory * (1 + SHARE))))
