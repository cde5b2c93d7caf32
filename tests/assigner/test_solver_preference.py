"""Among plans that the gap asked for does not tell apart: less memory, and what is least unlike the equal split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import make_profile, random_chain, single
from sweeps import sweep

from assigner.schedule.orders import warm_up
from assigner.schedule.simulate import predict
from assigner.solver import SolveOptions, solve, solve_baseline
from assigner.solver.baselines import TITLES, find_baselines
from assigner.solver.methods.candidate import Proposal
from assigner.solver.orders.search import OrderSearch, with_orders
from assigner.solver.problem.hints import resolve
from assigner.solver.search.preference import simpler
from assigner.solver.search.search import Search


def held(plan):
    return sum(worker.peak_bytes for worker in plan.predicted.workers)


def test_a_plan_keeps_no_more_micro_batches_in_flight_than_the_gap_is_worth():
    """GPipe and 1F1B take about as long with a heavy last stage: the plan is the one that holds less."""
    profile = make_profile(work=[1e-3] * 4 + [6e-3], slowness=[1.0, 1.1], batch=16)
    plan = solve(profile, single(micro_batches=16)).plan
    all_of_them = solve(profile, single(micro_batches=16, schedule="gpipe", gap=0)).plan
    assert max(warm_up(plan, n) for n in range(len(plan.stages))) <= 3
    assert held(plan) < 0.5 * held(all_of_them)
    assert plan.predicted.step_s <= all_of_them.predicted.step_s * 1.01
    assert plan.solver.gap <= 0.0101


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("seed", sweep(range(4), quick=2))
def test_a_lighter_plan_is_within_the_gap_and_never_heavier(seed, gap, monkeypatch):
    profile = random_chain(seed, partitions=6, workers=3, busy=0.1 * (seed % 2))
    options = single(gap=gap)
    chosen = solve(profile, options).plan
    monkeypatch.setattr("assigner.solver.search.preference.preferred", lambda _, best, __: best)
    fastest = solve(profile, options).plan
    assert held(chosen) <= held(fastest) * (1 + 1e-9)
    assert chosen.solver.gap <= max(gap, fastest.solver.gap) + 1e-6
    assert chosen.solver.bound_s <= fastest.predicted.step_s * (1 + 1e-9)
    assert predict(chosen, profile).step_s == chosen.predicted.step_s
    if gap == 0:
        assert chosen.predicted.step_s == pytest.approx(fastest.predicted.step_s, rel=1e-6)
    assert sum(each.status == "chosen" for each in chosen.candidates) == 1


@pytest.mark.parametrize("seed", sweep(range(5), quick=2))
def test_no_plan_within_the_gap_is_slower_than_a_baseline_beside_it(seed):
    """A wide gap allows lighter plans; one that the table beneath it beats would be no answer."""
    profile = random_chain(seed, partitions=6, workers=3, busy=0.1 * (seed % 2))
    plan = solve(profile, SolveOptions(schedule="1f1b", gap=0.3)).plan
    assert plan.predicted.step_s <= min(each.step_s for each in plan.baselines if each.step_s is not None) * (1 + 1e-9)


@pytest.fixture
def slow_search():
    """A search that has found a plan twice as slow as the equal split, and the baselines."""
    search = Search(*resolve(random_chain(1, partitions=6, workers=3), SolveOptions(schedule="1f1b")))
    search.price()
    simple = find_baselines(search.problem)
    equal = next(each for each in simple if each.title == TITLES["equal"])
    search.state.best = Proposal(replace(equal.plan, schedule="1f1b"), 2 * equal.step_s, "a slow search")
    return search, simple


def test_a_baseline_under_gpipe_is_an_answer_under_1f1b_too(slow_search):
    """Whatever the search itself has found."""
    search, simple = slow_search
    splits = [each for each in simple if each.plan is not None and each.plan.schedule == "gpipe"]
    found = simpler(search, [each for each in splits if len(each.plan.stages) == len(each.plan.workers)])
    assert found.plan.schedule == "1f1b"
    assert found.value < search.state.best_value


def test_orders_replace_no_baseline_that_is_faster(slow_search, monkeypatch):
    """Where the search itself has found nothing, too."""
    monkeypatch.setattr(OrderSearch, "run", lambda _: [])
    search, simple = slow_search
    best = Proposal(search.state.best.plan, 0.5 * min(each.step_s for each in simple), "a baseline")
    assert with_orders(search, best, simple, fastest_s=math.inf) is best


def test_twins_take_the_places_that_the_equal_split_gives_them():
    """Measured by itself, the second of two like workers is a hair faster: that turns no plan around."""
    profile = make_profile(work=[2e-3] * 5 + [3e-3], slowness=[1.0, 0.9995], batch=16)
    profile = replace(profile, workers=tuple(replace(worker, kind="cpu") for worker in profile.workers))
    plan, equal = solve(profile, single()).plan, solve_baseline(profile, "equal")
    changed = sum(plan.placement[name] != worker for name, worker in equal.placement.items())
    assert changed <= 1
    assert plan.solver.gap <= 0.0101


def test_pins_and_the_order_asked_for_outweigh_the_equal_split():
    profile = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.0])
    profile = replace(profile, workers=tuple(replace(worker, kind="cpu") for worker in profile.workers))
    pinned = solve(profile, single(pins={"p0": "worker:1"})).plan
    assert pinned.placement["p0"] == "worker:1/cpu"
    ordered = solve(profile, single(order=("worker:1", "worker:0"))).plan
    assert ordered.placement["p0"] == "worker:1/cpu"


def test_a_lighter_plan_that_is_not_proven_in_time_is_not_taken(monkeypatch):
    """Whatever the gap allows, a slower plan is an answer only with a proof."""
    monkeypatch.setattr("assigner.solver.search.search.Search.allows", lambda *_: False)
    profile = random_chain(1, partitions=6, workers=3)
    plan = solve(profile, single(gap=0.05)).plan
    monkeypatch.setattr("assigner.solver.search.preference.preferred", lambda _, best, __: best)
    assert plan.predicted.step_s == pytest.approx(solve(profile, single(gap=0.05)).plan.predicted.step_s)
