"""Memory over time: never above the cost model's sum, and equal to it where all of its parts meet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile, worker_name
from drawn_plans import drawn

from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import Held, Occupancy, memory_over_time
from assigner.schedule.program import build_program
from assigner.schedule.simulate import run_program, worker_memory

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


def with_share(profile: Profile, share: float) -> Profile:
    """Allocators that take a share beyond their tensors."""
    return replace(profile, workers=tuple(replace(each, allocator_share=share) for each in profile.workers))


def over_time(plan: Plan, profile: Profile) -> dict[str, Occupancy]:
    timeline = run_program(build_program(plan, profile.edges, profile.ties), CostModel(profile))
    return {each.worker: each for each in memory_over_time(timeline, CostModel(profile))}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(40))
def test_no_moment_is_above_the_sum(seed: int, schedule: str) -> None:
    """On random plans each part, and all of them together, stay within what the cost model allows for, to the bit."""
    profile, plan = drawn(seed, schedule)
    share = (0.0, 0.18)[seed % 2]
    profile = with_share(profile, share)
    for worker, found in over_time(plan, profile).items():
        allowed = worker_memory(CostModel(profile), plan, worker)
        assert found.peak.total <= allowed.total
        assert all(held.activations <= allowed.activations for held in found.held)
        assert all(held.workspace <= allowed.workspace for held in found.held)
        assert all(held.messages <= allowed.messages for held in found.held)
        moments = [held.at_s for held in found.held]
        assert moments == sorted(set(moments))
        assert found.held[0].at_s == 0
        assert found.held[-1][1:] == (0, share * found.state.total, 0)


@pytest.mark.parametrize("share", [0.0, 0.18])
@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_sends_nothing_on_reaches_the_sum_under_gpipe(seed: int, share: float) -> None:
    """Its first backward finds all M micro-batches in flight, recomputes and uses the workspace: nothing is missing."""
    profile, plan = drawn(2 * seed, "1f1b")  # a chain, one stage a worker
    stages = tuple(replace(each, rematerialise=each.partitions[:1], in_flight=None) for each in plan.stages)
    plan = replace(plan, schedule="gpipe", stages=stages)
    last = plan.stages[-1].worker
    profile = with_share(profile, share)
    assert over_time(plan, profile)[last].peak == worker_memory(CostModel(profile), plan, last)


def test_a_worker_that_sends_on_is_below_the_sum_by_what_it_sends() -> None:
    """In a chain under GPipe the last output has long left when the first gradient comes: the sum has both."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], edge_bytes=1e5)
    profile = replace(profile, measurements=tuple(replace(m, workspace_bytes=3e4) for m in profile.measurements))
    plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])], micro_batches=4)
    found, output = over_time(plan, profile), 1e5 * plan.micro_batch_size
    first, last = worker_name(0), worker_name(1)
    assert found[first].peak.total == worker_memory(CostModel(profile), plan, first).total - output
    assert found[last].peak == worker_memory(CostModel(profile), plan, last)


def test_two_stages_in_letters() -> None:
    """One micro-batch on two workers, every moment of the first written down."""
    profile = make_profile(work=[1.0, 1.0], slowness=[1.0, 1.0], batch=1, latency=0.5, bandwidth=1e15, edge_bytes=100.0)
    profile = replace(profile, measurements=tuple(replace(m, workspace_bytes=7.0) for m in profile.measurements))
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=1)
    plan = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p0",)), plan.stages[1]))
    kept = 1e6
    first, last = over_time(plan, profile).values()
    assert [pytest.approx(held, rel=1e-6) for held in first.held] == [
        Held(0.0, 0.0, 7.0, 0.0),  # its forward; what it reads comes from the batch
        Held(1.0, 0.0, 0.0, 100.0),  # the output travels
        Held(1.5, 0.0, 0.0, 0.0),
        Held(4.5, 0.0, 0.0, 100.0),  # its gradient travels
        Held(5.0, kept, 7.0, 100.0),  # the backward, which recomputes
        Held(8.0, 0.0, 0.0, 0.0),
    ]
    assert [pytest.approx(held, rel=1e-6) for held in last.held] == [
        Held(0.0, 0.0, 0.0, 0.0),
        Held(1.5, kept + 100, 7.0, 0.0),
        Held(4.5, 0.0, 0.0, 0.0),
    ]
    assert first.state.total == last.state.total == 4e6
    assert first.highest.at_s == pytest.approx(5.0)


def test_an_allocators_share_is_of_all_that_is_held_at_the_moment() -> None:
    """At every moment what is held is so much more than the tensors alone, the state among them."""
    profile, plan = drawn(2, "1f1b")
    bare, more = over_time(plan, profile), over_time(plan, with_share(profile, 0.25))
    for worker, found in more.items():
        totals = [
            [each.state.total + held.activations + held.workspace + held.messages for held in each.held]
            for each in (found, bare[worker])
        ]
        assert totals[0] == pytest.approx([1.25 * total for total in totals[1]])
        assert found.peak.total == pytest.approx(1.25 * bare[worker].peak.total)


def test_an_output_that_waits_for_the_link_is_there() -> None:
    """Two outputs of one forward share a link: until the first has left both are held, then the second alone."""
    profile = make_profile(work=[1.0] * 3, slowness=[1.0] * 2, edges=[(0, 2), (1, 2)], batch=1, latency=0.5,
                           bandwidth=1e15, edge_bytes=100.0)  # fmt: skip
    plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2"])], micro_batches=1)
    sending = {
        round(held.at_s, 6): held.messages for held in over_time(plan, profile)[worker_name(0)].held if held.at_s < 3.5
    }
    assert sending == pytest.approx({0.0: 0.0, 2.0: 200.0, 2.5: 100.0, 3.0: 0.0})
