"""Lines of devices: against trying everything, by dynamic program and by integer program."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from load import DeviceClass, LoadOptions, evaluate, solve_load
from load_cases import CONVENTIONS, best_by_trying, random_problem

SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_dynamic_program_finds_and_proves_the_optimum(convention, seed):
    """On small graphs the value is what trying everything finds, and no bound exceeds it."""
    problem = random_problem(convention, seed, nodes=4 if convention == "replicas" else 5)
    answer = solve_load(problem)
    best = best_by_trying(problem)
    if math.isinf(best):
        assert answer.infeasible
        assert not answer.stages
        return
    assert answer.value == pytest.approx(best)
    assert answer.bound == pytest.approx(best)
    assert evaluate(problem, answer.stages).value == answer.value


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("convention", ["dnn-partitioning", "pipedream"])
def test_the_staircase_proves_the_optimum_where_downsets_are_too_many(convention, solver):
    """Without the dynamic program over all downsets the integer programs agree with trying everything."""
    problem = random_problem(convention, 1)
    answer = solve_load(problem, LoadOptions(downsets=1, solver=solver))
    best = best_by_trying(problem)
    assert answer.value == pytest.approx(best)
    assert answer.bound == pytest.approx(best, rel=1e-5)  # CBC's own bound is what its gap leaves


def test_the_staircase_bounds_placements_with_second_options():
    """With shares of second options the integer programs prove a bound that is not above the optimum."""
    for seed in SEEDS:
        problem = random_problem("piper", seed)
        answer, best = solve_load(problem, LoadOptions(downsets=1)), best_by_trying(problem)
        assert answer.bound <= best * (1 + 1e-6)
        assert answer.value >= best * (1 - 1e-9)


def test_the_same_seed_gives_the_same_placement():
    """Two searches agree in every stage."""
    problem = random_problem("dnn-partitioning", 2, nodes=9)
    assert solve_load(problem).stages == solve_load(problem).stages


def test_no_room_is_proven():
    """Where nothing fits, that is the answer and not an error."""
    problem = random_problem("piper", 0)
    tiny = replace(problem, devices=(DeviceClass("device", 2, 0.5),))
    assert solve_load(tiny).infeasible
    assert solve_load(tiny, LoadOptions(downsets=1)).infeasible


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    """Ctrl-C ends the search with what it has."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("load.search.all_downsets", stop)
    answer = solve_load(random_problem("pipedream", 3))
    assert math.isfinite(answer.value)
    assert answer.found_by == "dynamic program along orders"
