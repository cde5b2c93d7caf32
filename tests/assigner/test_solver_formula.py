"""The dynamic program's price, the ILP's objective and the simulator give one step time for a chain under GPipe."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from brute_force import best_plan, random_instance
from builders import make_profile, single

from assigner.formats.profile import Tie
from assigner.schedule.cost import CostModel
from assigner.solver import solve
from assigner.solver.methods.candidate import SearchState
from assigner.solver.methods.dynamic_program import DynamicProgram
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.problem.objectives import GPipeStep
from assigner.solver.problem.perfect_split import WorkBefore
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.stage_options import StageOptions

if TYPE_CHECKING:
    from assigner.solver.problem.interval_prices import IntervalPrices


def random_pipelines(seed: int, number: int, *, tied: bool = False):
    rng = random.Random(seed)
    profile = random_instance(
        seed, partitions=6, workers=4, busy=seed % 2 == 0, late_updates=seed % 3 == 0, alike=seed % 5 == 0,
        tight=seed % 4 == 0,
    )  # fmt: skip
    if tied:
        ends = rng.sample(profile.partitions, 2)
        size = rng.choice([0.1, 0.5, 1.0]) * min(each.parameter_bytes for each in ends)
        profile = replace(profile, ties=(Tie("shared", tuple(each.name for each in ends), size),))
    table = Problem(profile, single(), CostModel(profile)).prices(rng.choice([1, 2, 4])).intervals
    free = [len(group) for group in table.groups]
    while number:
        cuts = sorted(rng.sample(range(1, 6), rng.randrange(4)))
        groups = [rng.randrange(len(free)) for _ in range(len(cuts) + 1)]
        columns = [
            table.gpipe.find(a, b - 1, group) for a, b, group in zip([0, *cuts], [*cuts, 6], groups, strict=True)
        ]
        if all(columns) and all(groups.count(k) <= free[k] for k in groups):
            number -= 1
            yield table, tuple(columns)


def told_s(table: IntervalPrices, columns) -> float:
    """What the dynamic program says of one pipeline."""
    program = DynamicProgram(only(table, columns), GPipeStep(table.micro_batches))
    ((price, found),) = program.run().pipelines
    assert found == columns
    return price


def only(table: IntervalPrices, columns) -> StageOptions:
    """Stage options of which one pipeline alone can be made."""
    options = StageOptions(table, deep=False)
    options.all = columns
    return options


@pytest.mark.parametrize("seed", range(12))
def test_the_price_is_the_simulated_step_time_but_for_early_turns(seed):
    """For any pipeline of a chain, with busy shares, unlike directions, late updates and M = 1, to 1e-9."""
    as_told = 0
    for table, columns in random_pipelines(seed, 12):
        candidate = GPipeCandidate(SearchState(table.problem, lambda: None), table.micro_batches)
        takes, told = candidate.plans.simulate(columns), told_s(table, columns)
        assert told <= takes * (1 + 1e-9)
        as_told += told == pytest.approx(takes, rel=1e-9)
    assert as_told >= 9


@pytest.mark.parametrize("seed", range(12))
def test_a_shared_gradient_is_sent_whatever_keeps_its_worker_busy(seed):
    """With tied parameters the price is a lower bound."""
    for table, columns in random_pipelines(seed, 12, tied=True):
        candidate = GPipeCandidate(SearchState(table.problem, lambda: None), table.micro_batches)
        assert told_s(table, columns) <= candidate.plans.simulate(columns) * (1 + 1e-9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_completion_of_a_suffix_is_below_its_least_price(seed, tied):
    """Also where an update of what is placed ends later than all that is still to come in front of it."""
    for table, columns in random_pipelines(seed, 12, tied=tied):
        objective, rest = GPipeStep(table.micro_batches), WorkBefore(table)
        program = DynamicProgram(only(table, columns), objective)
        whole = program.price(columns)
        for n, stage in enumerate(columns):
            free = np.array([len(group) for group in table.groups])
            for each in columns[n:]:
                free[each.group] -= 1
            before = rest.before(np.array([stage.first]), (rest.weight @ free)[:, None])
            assert float(objective.least(program.marks(columns[n:]), before)[0]) <= whole * (1 + 1e-9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_ilps_objective_equals_the_price(seed, tied):
    """With x fixed to a pipeline, the ILP's optimum is the dynamic program's price, to 1e-9; with ties a bound."""
    import pulp

    from assigner.solver.ilp.linear import Backend
    from assigner.solver.ilp.pipelines import PipelineModel

    for table, columns in random_pipelines(seed, 3, tied=tied):
        model = PipelineModel(table, table.gpipe.all, deep=False, unit=1e-3)
        for column, x in zip(model.columns, model.x, strict=True):
            model.problem.addConstraint(
                pulp.LpConstraint(
                    pulp.LpAffineExpression({x: 1}), pulp.LpConstraintEQ, f"fix_{x.name}", int(column in columns)
                )
            )
        found = Backend("highs", 0).relax(model.problem, time_limit=10).value * 1e-3
        candidate = GPipeCandidate(SearchState(table.problem, lambda: None), table.micro_batches)
        if tied:
            assert found <= candidate.plans.simulate(columns) * (1 + 1e-9)
        else:
            assert found == pytest.approx(told_s(table, columns), rel=1e-9)


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
    plan = solve(profile, single(schedule="gpipe", gap=0, solver=solver)).plan
    best = best_plan(profile)
    assert best is not None
    assert plan.predicted.step_s == pytest.approx(best[0], rel=1e-9)
    assert plan.solver.status == "optimal"
    table = Problem(profile, single(), CostModel(profile)).prices(plan.micro_batches).intervals
    group = {members[0]: number for number, members in enumerate(table.groups)}
    columns = tuple(table.gpipe.find(i, i, group[stage.worker]) for i, stage in enumerate(plan.stages))
    assert told_s(table, columns) < plan.predicted.step_s * (1 - 1e-6)


@pytest.mark.parametrize("seed", [7, 82, 95])
def test_updates_that_end_beside_the_backwards_in_front_hide_no_plan(seed):
    """The last partitions' updates are long: what they take is not added to what others compute meanwhile."""
    rng = random.Random(seed)
    drawn = random_instance(
        seed, partitions=7, workers=3, busy=False, late_updates=True, alike=seed % 2 == 0, tight=False
    )
    last = drawn.order[-2:]
    profile = replace(
        drawn,
        measurements=tuple(
            replace(each, update_s=each.update_s * (rng.uniform(1, 6) if each.partition in last else 0.05))
            for each in drawn.measurements
        ),
    )
    plan = solve(profile, single(schedule="gpipe", gap=0)).plan
    best = best_plan(profile)
    assert best is not None
    assert plan.solver.status == "optimal"
    assert plan.predicted.step_s == pytest.approx(best[0], rel=1e-9)
