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
    """On small graphs and chains the value is what trying everything finds, and no bound exceeds it."""
    links = convention in ("links", "busy")
    problem = random_problem(convention, seed, nodes=4 if links or convention == "replicas" else 5, chain=links)
    answer = solve_load(problem)
    best = best_by_trying(problem)
    if math.isinf(best):
        assert answer.infeasible
        assert not answer.stages
        return
    assert answer.value == pytest.approx(best)
    assert answer.bound == pytest.approx(best)
    assert evaluate(problem, answer.stages).value == answer.value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("convention", ["links", "busy"])
def test_values_that_skip_a_stage_leave_the_bound_below_the_optimum(convention, seed):
    """Of graphs under "links" the bound holds, and the value is one of a placement that exists."""
    problem = random_problem(convention, seed, nodes=4)
    answer, best = solve_load(problem), best_by_trying(problem)
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.value >= best * (1 - 1e-9)
    assert math.isinf(best) == math.isinf(answer.value)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("convention", ["dnn-partitioning", "overlapped", "pipedream"])
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


@pytest.mark.parametrize("convention", ["links", "busy"])
def test_devices_that_differ_in_links_alone_bound_the_rest_as_one(convention):
    """The coarse bound is not above the optimum, and the placement is one of real devices."""
    for seed in SEEDS:
        problem = random_problem(convention, seed, nodes=4, chain=True)
        like = tuple(
            replace(node, options=tuple(replace(o, seconds=(o.seconds[0],) * 2) for o in node.options))
            for node in problem.nodes
        )
        problem = replace(problem, nodes=like, devices=tuple(replace(each, memory=20) for each in problem.devices))
        answer, best = solve_load(problem, LoadOptions(states=1)), best_by_trying(problem)
        assert answer.bound <= best * (1 + 1e-9)
        assert answer.value >= best * (1 - 1e-9)
        assert math.isinf(answer.value) == math.isinf(best)


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


def test_progress_is_told():
    """The callback hears falling values and bounds below them."""
    heard = []
    solve_load(random_problem("overlapped", 3), LoadOptions(progress=lambda value, bound: heard.append((value, bound))))
    assert heard
    assert all(bound <= value for value, bound in heard)
    assert [value for value, _ in heard] == sorted((value for value, _ in heard), reverse=True)


def test_an_interrupt_leaves_the_best_so_far():
    """Ctrl-C, told by the progress callback, ends the search with what it has."""

    def stop(value: float, bound: float) -> None:
        raise KeyboardInterrupt

    answer = solve_load(random_problem("overlapped", 3), LoadOptions(progress=stop))
    assert math.isfinite(answer.value)
    assert answer.notes == ("interrupted",)


def test_like_classes_count_as_one_in_every_convention():
    """Accelerators that are given as classes of their own are searched as one class."""
    problem = random_problem("dnn-partitioning", 3)
    accelerator, cpu = problem.devices
    nodes = tuple(
        replace(node, options=tuple(replace(o, seconds=(o.seconds[0], *o.seconds)) for o in node.options))
        for node in problem.nodes
    )
    split = replace(problem, nodes=nodes, devices=(replace(accelerator, count=1), replace(accelerator, count=1), cpu))
    assert solve_load(split, LoadOptions(states=1)).value == pytest.approx(solve_load(problem).value)


def test_a_gap_does_not_end_the_search_before_there_is_a_line():
    """Where the first line's stages turn out not to fit, the search goes on to one that does."""
    problem = random_problem("links", 207, nodes=4)
    assert solve_load(problem, LoadOptions(gap=0.01)).value == pytest.approx(best_by_trying(problem), rel=0.011)
