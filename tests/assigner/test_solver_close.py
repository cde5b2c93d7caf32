"""From the usual gap on to 0: the ILPs of both schedules, and when they are asked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import single

from assigner.solver import solve
from assigner.solver.methods.candidate import INTEGER_PROGRAM, RELAXATION
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.hints import resolve
from assigner.solver.search.search import Search

CASES = [
    {"partitions": 4, "workers": 2, "busy": True},
    {"partitions": 5, "workers": 2, "tight": True},
    {"partitions": 4, "workers": 3, "alike": True, "missing": 0.2},
    {"partitions": 4, "workers": 2, "graph": True, "busy": True},
    {"partitions": 5, "workers": 2, "graph": True, "late_updates": True, "tight": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_ilp_of_1f1b_is_a_bound(case):
    """Its optimum over all stage options is above no plan that there is, and above 0."""
    compared = 0
    for seed in range(2):
        profile = random_instance(seed, **case)
        search = Search(*resolve(profile, single(schedule="1f1b", gap=0)))
        if search.problem.branched:
            continue
        for count in {each.micro_batches for each in search.candidates}:
            best = best_plan(profile, schedules=("1f1b",), micro_batches=count)
            candidates = [each for each in search.candidates if each.micro_batches == count]
            if best is None:
                continue
            bounds = []
            for candidate in candidates:
                assert isinstance(candidate, PipelineCandidate)
                model = candidate.statement(candidate.options.all, unit=1e-3)
                outcome = search.state.backend.search(model.problem, gap=0.0, cutoff=math.inf, time_limit=60)
                bounds.append(outcome.bound * model.unit)
            assert 0 < min(bounds) <= best[0] * (1 + 1e-9)
            compared += 1
    assert compared


@pytest.mark.parametrize("seed", range(4))
def test_without_a_gap_asked_for_small_problems_are_closed(seed):
    """The plan is the best of all by brute force, told as optimal; the usual gap, asked for, may stop before that."""
    profile = random_instance(seed, partitions=5, workers=2, busy=True, tight=seed % 2 == 0)
    solver = solve(profile, single()).plan.solver
    best = best_plan(profile, schedules=("gpipe", "1f1b"))
    assert (solver.status, solver.gap) == ("optimal", 0.0)
    assert solver.objective_s == pytest.approx(best[0], rel=1e-6)
    stopped = solve(profile, single(gap=0.01)).plan.solver
    assert stopped.status == "optimal"
    assert solver.objective_s <= stopped.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_bound_that_was_known_before_the_plan_is_named(objective):
    """Of one schedule and count, the dynamic program's first answer is the best there is."""
    solver = solve(
        random_instance(1, partitions=5, workers=2), single(objective=objective, micro_batches=2)
    ).plan.solver
    assert (solver.status, solver.proven_by) == ("optimal", ("dynamic program",))


def test_the_integer_program_is_named_where_it_closed_the_gap():
    """What the dynamic programs leave open the solver closes, and its name is told."""
    profile = random_instance(30, partitions=5, workers=3, late_updates=True)
    solver = solve(profile, single(schedule="gpipe")).plan.solver
    assert {RELAXATION, INTEGER_PROGRAM} & set(solver.proven_by)
    assert (solver.name, solver.gap) == ("HiGHS", 0.0)


def test_no_solver_is_named_where_none_ran(monkeypatch):
    """A proof by dynamic programs alone has this program's name."""
    profile = random_instance(1, partitions=5, workers=2)
    for kind in (GPipeCandidate, PipelineCandidate):
        monkeypatch.setattr(kind, "closable", False)
    solver = solve(profile, single()).plan.solver
    assert solver.name == "assigner"
    assert not {RELAXATION, INTEGER_PROGRAM} & {*solver.proven_by, solver.found_by}


def test_what_is_too_large_to_close_keeps_the_usual_gap(monkeypatch):
    """Where one candidate cannot be closed, none is: the answer is that of the usual gap."""
    profile = random_instance(3, partitions=6, workers=3, busy=True)
    asked = solve(profile, single(gap=0.01)).plan
    monkeypatch.setattr(PipelineCandidate, "closable", False)
    monkeypatch.setattr(GPipeCandidate, "closable", False)
    plan = solve(profile, single()).plan
    assert plan.stages == asked.stages
    assert replace(plan.solver, seconds=0, options={}) == replace(asked.solver, seconds=0, options={})
