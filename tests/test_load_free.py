"""Free placements: against trying everything, and against lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from load import DeviceClass, LoadOptions, evaluate, solve_load
from load_cases import best_by_trying, random_problem

from assigner.errors import FormatError


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("seed", range(5))
def test_free_placements_are_optimal(seed, solver):
    """Annealing and the integer program find and prove what trying everything finds."""
    problem = replace(random_problem("dnn-partitioning", seed), contiguous=False)
    answer, best = solve_load(problem, LoadOptions(solver=solver)), best_by_trying(problem)
    assert answer.value == pytest.approx(best)
    assert answer.bound == pytest.approx(best, rel=1e-5)
    assert evaluate(problem, answer.stages).value == answer.value


def test_a_free_placement_is_never_worse_than_a_line():
    """The best line is where the search of free placements starts."""
    line = random_problem("dnn-partitioning", 5, nodes=9)
    free = replace(line, contiguous=False)
    assert solve_load(free).value <= solve_load(line).value * (1 + 1e-9)


def test_the_same_seed_gives_the_same_free_placement():
    """Annealing counts its steps, so two searches agree."""
    problem = replace(random_problem("dnn-partitioning", 4, nodes=8), contiguous=False)
    assert solve_load(problem).stages == solve_load(problem).stages


def test_no_room_is_proven_for_free_placements_too():
    """Where a node fits nowhere, that is proven."""
    problem = random_problem("dnn-partitioning", 0)
    tiny = replace(
        problem, contiguous=False, devices=tuple(DeviceClass(each.name, each.count, 0.5) for each in problem.devices)
    )
    assert solve_load(tiny).infeasible


@pytest.mark.parametrize("convention", ["piper", "pipedream"])
def test_conventions_of_a_line_are_refused(convention):
    """Positions, options and relayed values have no meaning without a line."""
    with pytest.raises(FormatError, match="free placement"):
        replace(random_problem(convention, 0), contiguous=False)
