"""The coarse levels of the search: their bounds hold, their plans can run, and each part is exact where it says so."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from brute_force import random_instance
from builders import make_profile, single
from sweeps import sweep

from assigner.errors import InfeasibleError
from assigner.formats.profile import LinkPoint
from assigner.schedule.cost import CostModel, message_s
from assigner.schedule.simulate import overfull, predict
from assigner.solver import solve
from assigner.solver.fleet import path_program
from assigner.solver.fleet.option_arrays import HopArrays, OptionArrays, messages_s
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import SearchState
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.problem.problem import Problem

COUNT = 4


def draw(seed: int, *, partitions: int = 6, workers: int = 4):
    """A chain that differs with the seed in everything that the solver knows of chains."""
    rng = random.Random(seed)
    return random_instance(
        seed, partitions=partitions, workers=workers, busy=rng.random() < 0.3, tight=rng.random() < 0.6,
        missing=rng.choice([0, 0, 0.2]), pins=rng.random() < 0.3, late_updates=rng.random() < 0.3,
        alike=rng.random() < 0.5,
    )  # fmt: skip


def descend(profile, *, gap: float = 1e-4, count: int = COUNT, **options):
    """The hierarchy by itself: the best plan's value, the plan, and the bound."""
    problem = Problem(profile, single(schedule="gpipe", gap=gap, **options), CostModel(profile))
    candidate = GPipeCandidate(SearchState(problem, lambda: None), count)
    search = candidate.hierarchy
    if math.isfinite(search.bound) and search.start() and candidate.best is not None:
        search.search(60)
    return candidate.best_value, candidate.best and candidate.best.plan, search.bound


@pytest.mark.parametrize("seed", sweep([*range(6), 14, 16, 21, 58], quick=[0, 1, 3, 14, 16, 21, 58]))
def test_the_bound_is_below_the_optimum_and_the_plan_can_run(seed):
    """The flat search, proven to a gap of zero, lies between the hierarchy's bound and its plan."""
    profile = draw(seed)
    value, plan, bound = descend(profile)
    try:
        optimum = solve(profile, single(gap=0, schedule="gpipe", micro_batches=COUNT)).plan.solver.objective_s
    except InfeasibleError:
        assert plan is None
        return
    assert bound <= optimum * (1 + 1e-9)
    if plan is not None:
        prediction = predict(plan, profile)
        assert prediction.step_s == pytest.approx(value, rel=1e-9)
        assert value >= optimum * (1 - 1e-6)
        assert not overfull(prediction)


@pytest.mark.parametrize("seed", sweep(range(8), quick=[0, 1]))
def test_forwards_without_time_leave_the_bound_below_the_optimum(seed):
    """The slowest server of the forwards may then take 0 seconds, which every worker can do."""
    profile = draw(seed)
    still = replace(profile, measurements=tuple(replace(each, forward_s=0.0) for each in profile.measurements))
    value, _, bound = descend(still)
    optimum = solve(still, single(gap=0, schedule="gpipe", micro_batches=COUNT)).plan.solver.objective_s
    assert bound <= optimum * (1 + 1e-9)
    assert bound >= optimum * 0.9
    assert value >= optimum * (1 - 1e-6)


@pytest.mark.parametrize("seed", sweep(range(8), quick=4))
def test_where_workers_of_a_kind_are_alike_it_is_exact(seed):
    """Without busy shares and late updates a path of kinds is the plan: bound and plan meet."""
    profile = random_instance(seed, partitions=7, workers=4, tight=seed % 2 == 0, alike=True)
    value, _, bound = descend(profile, gap=1e-6)
    optimum = solve(profile, single(gap=0, schedule="gpipe", micro_batches=COUNT)).plan.solver.objective_s
    assert value == pytest.approx(optimum, rel=1e-3)
    assert bound == pytest.approx(optimum, rel=1e-3)


def thin_between_hosts(profile, *, hosts: int, slow: float):
    """The same workers spread over hosts, links between hosts slower."""
    workers = tuple(replace(each, host=f"host{n % hosts}") for n, each in enumerate(profile.workers))
    host = {each.name: each.host for each in workers}
    links = tuple(
        replace(link, points=(LinkPoint(1e6, 1e-4 if host[link.source] == host[link.target] else slow),))
        for link in profile.links
    )
    return replace(profile, workers=workers, links=links)


@pytest.mark.parametrize("visits", [True, False])
@pytest.mark.parametrize("seed", sweep(range(6), quick=3))
def test_visits_to_hosts_keep_the_bound_below_the_optimum(seed, visits, monkeypatch):
    """Thin links between hosts: the bound counts them, one by one or in all, and still no plan is below it."""
    if not visits:
        monkeypatch.setattr(tuning, "VISIT_STATES", 0)
    base = random_instance(seed, partitions=7, workers=4, tight=seed % 2 == 0, alike=True)
    profile = thin_between_hosts(base, hosts=2, slow=5e-3)
    value, plan, bound = descend(profile)
    optimum = solve(profile, single(gap=0, schedule="gpipe", micro_batches=COUNT)).plan.solver.objective_s
    assert bound <= optimum * (1 + 1e-9)
    assert bound >= optimum * 0.9
    assert optimum * (1 - 1e-6) <= value <= optimum * 1.1
    assert plan is not None


@pytest.mark.parametrize("visits", [True, False])
def test_hosts_that_are_thinly_linked_raise_the_bound(visits, monkeypatch):
    """Two hosts with one worker of each kind: the same workers on one host are bounded lower."""
    if not visits:
        monkeypatch.setattr(tuning, "VISIT_STATES", 0)
    base = make_profile(work=[2e-3] * 8, slowness=[1.0, 1.0, 1.0, 1.0])
    bounds = [descend(thin_between_hosts(base, hosts=hosts, slow=4e-3))[2] for hosts in (1, 2)]
    assert bounds[1] > bounds[0] * 1.02


def test_visits_to_a_host_that_are_too_many_are_not_made(monkeypatch):
    """Their number is told from the host's workers."""
    made = []
    monkeypatch.setattr(path_program, "_visits", lambda hosts: made.append(hosts) or [])
    monkeypatch.setattr(tuning, "VISIT_STATES", 0)
    base = make_profile(work=[2e-3] * 8, slowness=[1.0, 1.0, 1.0, 1.0])
    assert descend(thin_between_hosts(base, hosts=2, slow=4e-3))[1] is not None
    assert not made


@pytest.mark.parametrize("seed", range(10))
def test_intervals_priced_as_arrays_are_those_priced_one_by_one(seed):
    """Settled entries equal the columns; those that are not lie below."""
    profile = draw(seed)
    table = Problem(profile, single(schedule="gpipe"), CostModel(profile)).prices(COUNT).intervals
    kinds = table.kinds
    kind_prices = OptionArrays(table, kinds, len(profile.order), HopArrays(table))
    for number, kind in enumerate(kinds):
        for first, last in itertools.combinations_with_replacement(range(len(profile.order)), 2):
            columns = [table.gpipe.find(first, last, group) for group in kind]
            there = [column for column in columns if column is not None]
            least = [
                min((getattr(column, name) for column in there), default=math.inf)
                for name in ("forward_s", "backward_s", "update_s")
            ]
            at = number, first, last - first
            if there:
                assert kind_prices.forward[at] == pytest.approx(least[0])
                assert kind_prices.update[at] == pytest.approx(least[2])
            assert kind_prices.backward[at] <= least[1] * (1 + 1e-9)
            kind_prices.settle(number, first, last - first + 1)
            assert kind_prices.backward[at] == pytest.approx(least[1])


def test_messages_priced_as_arrays_are_those_priced_one_by_one():
    """Below, between and above the points of a sweep, with one point, and with a size of nothing."""
    sizes = np.array([0.0, 1.0, 10.0, 55.0, 100.0, 1e3, 5e3, 1e4, 1e6])
    for points in (
        (LinkPoint(10, 1e-4), LinkPoint(100, 2e-4), LinkPoint(1e4, 9e-3)),
        (LinkPoint(10, 3e-4), LinkPoint(100, 2e-4)),
        (LinkPoint(100, 1e-4),),
    ):
        assert messages_s(points, sizes) == pytest.approx([message_s(points, size) for size in sizes], rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_too_large_for_the_ilp_the_hierarchy_answers_alone(seed, monkeypatch):
    """A plan with an honest bound, the same again, and never proven where it is not."""
    monkeypatch.setattr(tuning, "MOST_COLUMNS", 0)
    profile = draw(seed, partitions=7)
    options = single(gap=0.05, schedule="gpipe")
    first, second = (solve(profile, options) for _ in range(2))
    timeless = [replace(each.plan, solver=replace(each.plan.solver, seconds=0.0)) for each in (first, second)]
    assert timeless[0] == timeless[1]
    report = first.plan.solver
    monkeypatch.undo()
    optimum = solve(profile, single(gap=0, schedule="gpipe")).plan.solver.objective_s
    assert report.bound_s <= optimum * (1 + 1e-9) <= report.objective_s * (1 + 1e-6)
    assert (report.status == "optimal") == (report.gap <= 0.05 + 1e-6)
    assert "dynamic program" in report.proven_by


def test_hints_hold_in_the_hierarchy(monkeypatch):
    """Pins, the largest number of workers, partitions kept apart and remat by name bind there too."""
    monkeypatch.setattr(tuning, "MOST_COLUMNS", 0)
    profile = make_profile(work=[2e-3] * 8, slowness=[1.0, 1.0, 1.5, 1.5])
    names = profile.order
    options = single(
        schedule="gpipe", max_workers=3, pins={names[0]: "worker:2"}, apart=((names[1], names[2]),),
        rematerialise={names[7]: "always"},
    )  # fmt: skip
    plan = solve(profile, options).plan
    assert len(plan.stages) <= 3
    assert plan.placement[names[0]].startswith("worker:2")
    assert plan.placement[names[1]] != plan.placement[names[2]]
    assert any(names[7] in stage.rematerialise for stage in plan.stages)


def test_many_kinds_are_taken_together(monkeypatch):
    """With more kinds than a sweep can tell apart, the most alike are bounded as one, and the plan is still real."""
    profile = make_profile(work=[2e-3] * 8, slowness=[1.0, 1.1, 2.0, 2.2])
    optimum = solve(profile, single(gap=0, schedule="gpipe", micro_batches=COUNT)).plan.solver.objective_s
    monkeypatch.setattr(tuning, "MOST_STATES", 8 * 3 * 12)
    value, plan, bound = descend(profile)
    assert plan is not None
    assert bound <= optimum <= value * (1 + 1e-9)
    assert bound >= 0.8 * optimum
    assert value <= 1.1 * optimum


def test_stopped_early_it_has_a_plan_and_a_bound_that_holds():
    """With no time to search after the first plan, the bound is what adding up gives."""
    profile = make_profile(work=[2e-3] * 8, slowness=[1.0, 1.0, 1.5, 1.5])
    problem = Problem(profile, single(schedule="gpipe"), CostModel(profile))
    candidate = GPipeCandidate(SearchState(problem, lambda: None), COUNT)
    search = candidate.hierarchy
    search.start()
    before = search.bound
    search.search(-math.inf)
    assert 0 < before <= search.bound <= candidate.best_value < math.inf
