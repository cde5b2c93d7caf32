"""What backwards in two parts cost and hold, by hand; where the profile says nothing of them; where they may be."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile
from drawn_combinations import in_parts as drawn_parts
from drawn_plans import drawn
from made_runs import run_in

from assigner.errors import FormatError
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.orders import Halves, halves, order_of
from assigner.schedule.simulate import predict, simulated, worker_memory
from assigner.solver import SolveOptions, solve
from assigner.solver.orders.tasks import may_split
from assigner.validation.calibration import calibrated
from assigner.validation.comparison import agree

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


def in_parts(profile: Profile, *, share: float = 0.5, longer: float = 1.0, waiting: float = 0.8) -> Profile:
    """The profile with the parts of backwards: of the first partition the input part takes no time."""
    first = profile.order[0]
    return replace(
        profile,
        measurements=tuple(
            replace(
                each,
                backward_input_s=0.0 if each.partition == first else share * longer * each.backward_s,
                backward_weight_s=longer * each.backward_s * (1.0 if each.partition == first else 1 - share),
                waiting_bytes=each.activation_bytes * (1.0 if each.partition == first else waiting),
            )
            for each in profile.measurements
        ),
    )


def two_stages(*orders: str, **parts: float) -> tuple[Profile, Plan]:
    """Forwards of 4 ms, backwards of 8 ms; messages and updates that take no time."""
    profile = in_parts(
        make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0], edge_bytes=0.0, latency=0.0, bandwidth=1e18), **parts
    )
    profile = replace(profile, measurements=tuple(replace(each, update_s=0.0) for each in profile.measurements))
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=2)
    return profile, replace(plan, schedule="listed", orders=dict(zip(plan.workers, orders, strict=True)))


def test_a_weight_part_runs_where_a_worker_would_wait():
    """The second stage's weight parts make room for what the first one waits for: 28 ms, where whole backwards take 36.

    worker 0:  F0 F1 .  I0W0      I1W1
    worker 1:  .  F0 I0 F1 I1 W0 W1
    """
    parts = two_stages("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    whole = two_stages("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert predict(parts[1], parts[0]).step_s == pytest.approx(28e-3)
    assert predict(whole[1], whole[0]).step_s == pytest.approx(36e-3)


def test_a_recompute_belongs_to_the_part_that_needs_the_graph():
    """That is the input part; of a partition that reads nothing with a gradient, the weight part."""
    profile, plan = two_stages("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    again = replace(plan, stages=tuple(replace(stage, rematerialise=stage.partitions) for stage in plan.stages))
    took = {
        (event.action.stage, event.action.kind.value): event.end_s - event.start_s
        for event in simulated(again, CostModel(profile)).events
        if event.action.route is None
    }
    assert took[0, "backward_input"] == 0
    assert took[0, "backward_weight"] == pytest.approx(12e-3)
    assert took[1, "backward_input"] == pytest.approx(8e-3)
    assert took[1, "backward_weight"] == pytest.approx(4e-3)


def test_what_waits_is_held_until_its_weight_part():
    """Graphs of 1 MB, of which 0.6 MB wait: at most one graph and what waits of it and of one more."""
    profile, plan = two_stages("0F0 0B0 0F1 0B1", "1F0 1I0 1F1 1I1 1W0 1W1", waiting=0.6)
    found = halves(order_of(plan, plan.workers[1]), 1)
    assert found == {Halves(1, 0), Halves(1, 1), Halves(0, 1), Halves(1, 2), Halves(0, 2)}
    activation = profile.measurements[0].activation_bytes * 4
    assert worker_memory(CostModel(profile), plan, plan.workers[1]).activations == pytest.approx(2.2 * activation)


def test_less_than_a_graph_that_waits_takes_nothing_off_others():
    """The first partition recomputes in its weight part: where less waits than a graph has, nothing does."""
    profile, _ = two_stages("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    first, second = (each.name for each in profile.partitions)
    less = (replace(each, waiting_bytes=0.1 * each.activation_bytes) for each in profile.measurements)
    cost = CostModel(replace(profile, measurements=tuple(less)))
    worker = profile.workers[0].name
    alone = cost.waiting_bytes([second], [], worker, 4)
    assert cost.waiting_bytes([first, second], [first], worker, 4) == alone > 0
    assert cost.waiting_bytes([first, second], [], worker, 4) > alone


def test_what_nobody_has_measured_is_not_priced():
    profile, plan = two_stages("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1B0 1F1 1B1")
    unmeasured = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0])
    with pytest.raises(FormatError, match="parts of the backward of p0 were not measured on worker:0/cpu"):
        predict(replace(plan, workload=unmeasured.workload), unmeasured)
    assert predict(plan, profile).step_s > 0


def test_the_parts_of_a_backward_are_measured_together():
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0])
    broken = replace(profile.measurements[0], backward_input_s=1.0)
    with pytest.raises(FormatError, match="go together"):
        replace(profile, measurements=(broken, *profile.measurements[1:]))


@pytest.mark.parametrize(("longer", "allowed"), [(0.9, True), (1.04, True), (1.06, False)])
def test_parts_that_take_longer_are_not_offered(longer, allowed):
    profile, plan = two_stages("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", longer=longer)
    assert may_split(plan, CostModel(profile)) is allowed
    assert not may_split(plan, CostModel(make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0])))


@pytest.mark.parametrize("seed", range(30))
def test_no_moment_is_above_the_sum(seed):
    """On random plans with random parts the memory over time stays within what the cost model allows for."""
    profile, plan = drawn(seed, ("gpipe", "1f1b", "interleaved")[seed % 3])
    profile, plan = in_parts(profile, waiting=(0.5, 1.0, 1.5)[seed % 3]), drawn_parts(plan, random.Random(seed))
    cost = CostModel(profile)
    for found in memory_over_time(simulated(plan, cost), cost):
        allowed = worker_memory(cost, plan, found.worker)
        assert all(held.activations <= allowed.activations * (1 + 1e-12) for held in found.held)
        assert found.peak.total <= allowed.total * (1 + 1e-12)
        assert found.held[-1].activations == pytest.approx(0, abs=1e-6)


def test_a_run_in_parts_is_compared_and_corrected():
    """Both parts have their rows and counts; where both take a quarter longer, the profile then says so."""
    profile, plan = two_stages("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0")
    truth = replace(profile, measurements=tuple(each.with_backwards(1.25) for each in profile.measurements))
    found = agree(plan, profile, run_in(truth, plan))
    rows = {(each.kind, each.stage): each for each in found.computes}
    assert [rows[kind, 1].count for kind in ("forward", "backward", "backward_input", "backward_weight")] == [
        2,
        1,
        1,
        1,
    ]
    assert ("backward", 0) not in rows
    assert rows["backward_weight", 1].once.measured_s == pytest.approx(
        1.25 * rows["backward_weight", 1].once.predicted_s
    )
    corrected = CostModel(calibrated(profile, found, trace="t"))
    for name, worker in (("p0", "worker:0/cpu"), ("p1", "worker:1/cpu")):
        assert corrected.parts(name, worker, 4)[:2] == pytest.approx(CostModel(truth).parts(name, worker, 4)[:2])


@pytest.mark.parametrize(("longer", "offered"), [(1.0, True), (1.2, False)])
def test_the_solver_lists_parts_only_where_they_hardly_take_longer(longer, offered):
    profile = in_parts(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], edge_bytes=1e3), longer=longer)
    plan = solve(profile, SolveOptions(schedule="listed", max_replicas=1)).plan
    assert any(step.letter == "W" for steps in plan.listed.values() for step in steps) is offered
