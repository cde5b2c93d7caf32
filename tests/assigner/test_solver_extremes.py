"""Profiles with figures that no machine has: an answer that is true, or words, and no warning of numpy's."""

from __future__ import annotations

from dataclasses import replace

import pulp
import pytest
from brute_force import best_plan
from builders import make_profile, random_chain, single, worker_name

from assigner.formats.profile import LinkPoint
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve
from assigner.solver.ilp.linear import LARGEST, Backend, LinearModel

DEAD_S = 1e13
OBJECTIVES = ["step", "throughput", "latency"]


def with_dead_links(profile, worker):
    """The profile where a message to or from one worker takes longer than the universe has been there."""
    name = worker_name(worker)
    points = (LinkPoint(1e3, DEAD_S), LinkPoint(1e6, DEAD_S))
    links = [replace(link, points=points) if name in (link.source, link.target) else link for link in profile.links]
    return replace(profile, links=tuple(links))


def of_times(profile, factor):
    """The profile with all of its compute times multiplied."""
    measured = [
        replace(
            each,
            forward_s=each.forward_s * factor,
            backward_s=each.backward_s * factor,
            update_s=each.update_s * factor,
        )
        for each in profile.measurements
    ]
    return replace(profile, measurements=tuple(measured))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_dead_links_are_not_used_where_there_is_a_plan_without(schedule, busy):
    """The plan is the best of all, by enumeration, and proven."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 0.5], busy=busy, batch=4)
    profile = with_dead_links(profile, 1)
    plan = solve(profile, single(schedule=schedule, gap=0)).plan
    assert plan.solver.status == "optimal"
    assert plan.predicted.step_s == pytest.approx(best_plan(profile, schedules=(schedule,))[0], rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_dead_link_is_used_where_nothing_else_fits(objective):
    """No worker has room for everything: the answer takes as long as the link does."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=1.9e7, activation=2e6, batch=2)
    plan = solve(with_dead_links(profile, 1), SolveOptions(objective=objective, remat="never")).plan
    assert len(plan.workers) == 2
    assert plan.predicted.step_s >= DEAD_S


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("links", [False, True], ids=["some links", "all zero"])
def test_a_profile_without_any_time_has_a_plan(objective, links):
    """A step of nothing is as short as can be."""
    profile = of_times(make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0]), 0.0)
    if links:
        zero = (LinkPoint(1e3, 0.0), LinkPoint(1e6, 0.0))
        profile = replace(profile, links=tuple(replace(link, points=zero) for link in profile.links))
    plan = solve(profile, SolveOptions(objective=objective)).plan
    assert plan.predicted.step_s == 0
    assert plan.solver.status == "optimal"


@pytest.mark.parametrize("factor", [5e-322, 1e-300, 1e-17, 1e15])
def test_times_of_any_size_are_planned(factor):
    """Prices that have no reciprocal, and such as make others vanish."""
    profile = of_times(make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], capacity=4e7), factor)
    plan = solve(profile).plan
    assert 0 <= plan.solver.bound_s <= plan.predicted.step_s * (1 + 1e-9)
    assert plan.predicted.step_s == predict(plan, profile).step_s


def test_a_worker_for_which_something_was_not_measured_has_no_share_of_everything():
    """Where no worker has measurements of all partitions, no baseline places everything on one."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0])
    kept = [each for each in profile.measurements if (each.partition, each.worker) != ("p1", worker_name(0))]
    assert solve(replace(profile, measurements=tuple(kept))).plan.predicted.step_s > 0


def test_workers_that_cost_nothing_and_hold_nothing_have_no_say():
    """The only free worker cannot hold everything: what a plan costs at least is a number, and the plan's own."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0])
    kept = [each for each in profile.measurements if (each.partition, each.worker) != ("p1", worker_name(0))]
    asked = SolveOptions(objective="cost", prices={worker_name(0): 0.0, worker_name(1): 2.5})
    report = solve(replace(profile, measurements=tuple(kept)), asked).plan.solver
    assert report.bound_s == pytest.approx(report.objective_s, rel=0.02)


def test_a_model_has_no_coefficients_that_the_solver_leaves_out():
    """Its optimum stays a bound: what makes a row hard is capped, and a row that more makes easy is not there."""
    model = LinearModel("m", unit=1.0)
    x, y = (model.problem.add_variable(name, 0) for name in "xy")
    model.problem.setObjective(pulp.LpAffineExpression({x: 1.0, y: 1.0}))
    model.above({x: 1.0}, {y: 1e18})
    model.add_row({x: 1e18, y: -1.0}, pulp.LpConstraintGE, 1.0)
    model.add_row({y: 1.0}, pulp.LpConstraintGE, 2.0)
    outcome = Backend("highs", 0).relax(model.problem, time_limit=10.0)
    assert outcome.value == pytest.approx(2 * LARGEST + 2)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_fits_to_the_last_byte_fits(schedule, objective):
    """The best plan stays the best where each of its workers has just what it needs: sums may differ in rounding."""
    for share in (0.1, 0.07, 0.013):
        profile = random_chain(7, partitions=4, workers=2)
        profile = replace(profile, workers=tuple(replace(each, allocator_share=share) for each in profile.workers))
        best = solve(profile, single(schedule=schedule, objective=objective, gap=0)).plan
        peak = {each.worker: each.peak_bytes for each in best.predicted.workers}
        workers = [replace(each, memory_bytes=peak.get(each.name, 0.0)) for each in profile.workers]
        again = solve(replace(profile, workers=tuple(workers)), single(schedule=schedule, objective=objective, gap=0))
        assert again.plan.solver.objective_s == best.solver.objective_s
        assert not overfull(again.plan.predicted)
