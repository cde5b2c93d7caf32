"""The closed formula, the ILP's objective and the simulator give one step time for a chain."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_profile

from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import predict
from assigner.solver import SolveOptions, solve
from assigner.solver.chain.formula import turn_steps_s
from assigner.solver.chain.placement import Placement, hops_of, make_plan
from assigner.solver.prices import PriceTable
from assigner.solver.problem import Problem


def random_pipelines(seed: int, number: int):
    rng = random.Random(seed)
    profile = random_instance(
        seed, partitions=6, workers=4, busy=seed % 2 == 0, late_updates=seed % 3 == 0, alike=seed % 5 == 0,
        tight=seed % 4 == 0,
    )  # fmt: skip
    instance = PriceTable(Problem(profile, SolveOptions(), CostModel(profile)), rng.choice([1, 2, 4]))
    free = [len(group) for group in instance.groups]
    while number:
        cuts = sorted(rng.sample(range(1, 6), rng.randrange(4)))
        groups = [rng.randrange(len(free)) for _ in range(len(cuts) + 1)]
        columns = [
            instance.options.get((a, b - 1, group)) for a, b, group in zip([0, *cuts], [*cuts, 6], groups, strict=True)
        ]
        if all(columns) and all(groups.count(k) <= free[k] for k in groups):
            number -= 1
            yield instance, tuple(columns)


@pytest.mark.parametrize("seed", range(12))
def test_the_formula_equals_the_simulated_step_time(seed):
    """For any pipeline of a chain, with busy shares, unlike directions, late updates and M = 1, to 1e-9."""
    for instance, columns in random_pipelines(seed, 12):
        plan = make_plan(instance, columns)
        told = max(turn_steps_s(columns, hops_of(instance, columns), instance.micro_batches))
        assert told == pytest.approx(predict(plan, instance.problem.profile).step_s, rel=1e-9)
        assert Placement.of(instance, columns).step_s == told


@pytest.mark.parametrize("seed", range(12))
def test_the_ilps_objective_equals_the_formula(seed):
    """With x fixed to a pipeline, the ILP's optimum is the step time with the turn at the last stage, to 1e-9."""
    import pulp

    from assigner.solver.ilp.backend import Backend
    from assigner.solver.ilp.gpipe import GPipeModel

    for instance, columns in random_pipelines(seed, 3):
        model = GPipeModel(instance, list(instance.options.values()), unit=1e-3)
        for column, x in zip(model.columns, model.x, strict=True):
            model.problem.addConstraint(
                pulp.LpConstraint(
                    pulp.LpAffineExpression({x: 1}), pulp.LpConstraintEQ, f"fix_{x.name}", int(column in columns)
                )
            )
        outcome = Backend("highs", 0).relax(model.problem, time_limit=10)
        last_turn = turn_steps_s(columns, hops_of(instance, columns), instance.micro_batches)[-1]
        assert outcome.value * 1e-3 == pytest.approx(last_turn, rel=1e-9)


def late_turn():
    """A large message keeps worker 1 busy for longer than all that lies behind it takes."""
    profile = make_profile(work=[4e-3, 1e-5, 1e-5], slowness=[1.0, 1.0, 1.0], bandwidth=1e8, latency=1e-5, batch=2)
    sizes = {"p0": 1e6, "p1": 1e2}
    pins = {"p0": "worker:0", "p1": "worker:1", "p2": "worker:2"}
    return replace(
        profile,
        edges=tuple(replace(edge, bytes_per_sample=sizes[edge.source]) for edge in profile.edges),
        links=tuple(replace(link, receiver_busy=1.0) for link in profile.links),
        partitions=tuple(replace(each, pin=pins.get(each.name)) for each in profile.partitions),
    )


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_turn_before_the_last_stage_is_priced(solver):
    """Where the step turns from forward to backward at a middle stage, the plan is still optimal and proven so."""
    profile = late_turn()
    plan = solve(profile, SolveOptions(schedule="gpipe", gap=0, solver=solver)).plan
    best = best_plan(profile)
    assert best is not None
    assert plan.predicted.step_s == pytest.approx(best[0], rel=1e-9)
    assert plan.solver.status == "optimal"
    instance = PriceTable(Problem(profile, SolveOptions(), CostModel(profile)), plan.micro_batches)
    group = {members[0]: number for number, members in enumerate(instance.groups)}
    columns = tuple(instance.options[i, i, group[stage.worker]] for i, stage in enumerate(plan.stages))
    steps = turn_steps_s(columns, hops_of(instance, columns), instance.micro_batches)
    assert max(range(3), key=steps.__getitem__) == 1
    assert max(steps) == pytest.approx(predict(plan, profile).step_s, rel=1e-9)
