"""Throughput on graphs with branches: priced as the simulator's steady state, searched whole, bounded honestly."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest
from brute_force import random_instance
from builders import single
from every_placement import assignments
from sweeps import sweep

from assigner.errors import FormatError, InfeasibleError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import steady_s
from assigner.schedule.simulate import overfull, predict, prediction_of
from assigner.solver import solve
from assigner.solver.free.candidate import FreeCandidate
from assigner.solver.free.pricing import SteadyPricing
from assigner.solver.ilp.placements import PlacementModel
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import SearchState
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.set_memory import SetMemory

BOTH = ("gpipe", "1f1b")
M = 4


def drawn(seed: int, *, partitions: int = 5):
    """A graph with branches: tight and not, workers alike and not."""
    rng = random.Random(seed)
    how = {
        "partitions": partitions, "workers": 3, "busy": rng.random() < 0.5, "tight": rng.random() < 0.7,
        "missing": rng.choice([0, 0, 0.2]), "pins": rng.random() < 0.3, "alike": rng.random() < 0.4,
    }  # fmt: skip
    profiles = (random_instance(100 * seed + n, graph=True, **how) for n in itertools.count())
    return next(profile for profile in profiles if problem_of(profile).branched)


def problem_of(profile, **options) -> Problem:
    resolved = resolve(profile, single(**{"objective": "throughput", "gap": 0.0, "micro_batches": M, **options}))
    return Problem(*resolved, CostModel(resolved[0]))


def placements(profile, schedule):
    """Every plan with one convex stage a worker, in every order of its stages, that recomputes least.

    Yields:
        M times the seconds of its steady state, and the plan.
    """
    cost = CostModel(profile)
    reads = {name: {edge.source for edge in profile.edges if edge.target == name} for name in profile.order}

    @cache
    def recomputed(worker, part, depth):
        capacity = cost.profile.worker[worker].capacity_bytes
        fitting = [
            subset
            for number in range(len(part) + 1)
            for subset in itertools.combinations(part, number)
            if cost.memory(worker, [(part, subset, depth)], 1).total <= capacity
        ]
        seconds = [(sum(cost.partition(name, worker, 1).recompute_s for name in subset), subset) for subset in fitting]
        return min(seconds)[1] if seconds else None

    for where in assignments(profile, {}):
        parts = {worker: tuple(n for n in profile.order if where[n] == worker) for worker in where.values()}
        for row in itertools.permutations(parts):
            done = [{name for worker in row[: n + 1] for name in parts[worker]} for n in range(len(row))]
            if any(not reads[name] <= done[n] for n, worker in enumerate(row) for name in parts[worker]):
                continue
            depths = [min(M, len(row) - n) if schedule == "1f1b" else M for n in range(len(row))]
            again = [recomputed(worker, parts[worker], depth) for worker, depth in zip(row, depths, strict=True)]
            if None in again:
                continue
            plan = Plan(
                workload=profile.workload, schedule=schedule, micro_batches=M, micro_batch_size=1,
                objective="throughput",
                stages=tuple(Stage(w, parts[w], twice) for w, twice in zip(row, again, strict=True)),
            )  # fmt: skip
            try:
                prediction_of(plan, cost)
            except FormatError:  # a link is missing
                continue
            yield M * steady_s(plan, cost), plan


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("seed", sweep(range(8), quick=4))
def test_the_best_throughput_is_found_and_proven(seed, schedule):
    """Of all convex stages in all orders, with what they must recompute where they stand, none are better."""
    profile = drawn(seed)
    options = single(objective="throughput", schedule=schedule, micro_batches=M, gap=0)
    values = [value for value, _ in placements(profile, schedule)]
    if not values:
        with pytest.raises(InfeasibleError):
            solve(profile, options)
        return
    plan = solve(profile, options).plan
    assert plan.solver.objective_s == pytest.approx(min(values), rel=1e-9)
    assert plan.solver.status == "optimal"
    assert min(values) * (1 - 2e-6) <= plan.solver.bound_s <= min(values) * (1 + 1e-12)
    assert not overfull(predict(plan, profile))


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("seed", sweep(range(100, 105), quick=3))
def test_a_placement_has_the_best_order_and_honest_bounds(seed, schedule):
    """Each is priced as its best order; neither bounds of its beginnings nor the ILP's relaxation are above that."""
    profile = drawn(seed)
    problem = problem_of(profile, schedule=schedule)
    room = SetMemory(problem, M)
    pricing = SteadyPricing(room, falling=schedule == "1f1b")
    best: dict[tuple[int, ...], float] = {}
    for value, plan in placements(profile, schedule):
        where = {name: stage.worker for stage in plan.stages for name in stage.partitions}
        key = tuple(room.table.names.index(where[name]) for name in problem.order)
        best[key] = min(value, best.get(key, math.inf))
    state = SearchState(problem, lambda: None)
    model = PlacementModel(room, one_stage=True, unit=1e-3, turns=schedule == "gpipe", steady=True)
    outcome = state.backend.relax(model.problem, time_limit=60)
    for where, value in best.items():
        masks = [sum(1 << i for i, at in enumerate(where) if at == w) for w in range(3)]
        found = pricing.price(room.table.in_order(masks))
        assert found.value_s == pytest.approx(value, rel=1e-9)
        assert M * steady_s(found.plan(schedule), problem.cost) == pytest.approx(value, rel=1e-9)
        for placed in range(len(where) + 1):
            known = [w if i < placed else -1 for i, w in enumerate(where)]
            part = [mask & (1 << placed) - 1 for mask in masks]
            assert pricing.least(known, part, math.inf)[0] <= value * (1 + 1e-12)
        assert outcome.bound * model.unit <= value * (1 + 1e-6)
    assert best


@pytest.mark.slow
@pytest.mark.parametrize("schedule", BOTH)
def test_a_search_that_is_not_whole_says_so(schedule, monkeypatch):
    """Beyond exhaustive search there are a plan and a bound below it, the same every time."""
    profile = random_instance(5, partitions=14, workers=3, graph=True, tight=True)
    monkeypatch.setattr(tuning, "NODES", 200)
    monkeypatch.setattr(tuning, "CERTAIN_STEADY", 1)
    monkeypatch.setattr(tuning, "ANNEALING_TRIES", 300)
    found = []
    for _ in range(2):
        state = SearchState(problem_of(profile, schedule=schedule), lambda: None)
        state.candidates = [candidate] = [FreeCandidate(state, schedule, M)]
        for phase in (candidate.price, candidate.start, candidate.tighten):
            phase()
        candidate.look_at_all()
        assert candidate.cut_short
        assert 0 < candidate.bound < state.best_value
        found.append((state.best.plan, candidate.bound))
    assert found[0] == found[1]
