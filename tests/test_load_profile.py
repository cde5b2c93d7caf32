"""A profile's steady state: the load problem counts what the simulator and the cost model count."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from builders import make_profile
from load import InFlight, LoadOptions, evaluate, solve_load
from load.from_profile import load_problem, plan_stages

from assigner.formats.plan import Plan
from assigner.formats.profile import Tie
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import predict

WORK = [2e-3, 5e-3, 3e-3, 4e-3, 1e-3, 6e-3]
SKIPS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 3), (1, 5)]


def solved(profile, *, micro_batch=2, in_flight=None, remat="auto"):
    cost = CostModel(profile)
    groups = [(worker.name,) for worker in profile.workers]
    problem = load_problem(
        cost, micro_batch=micro_batch, groups=groups, in_flight=in_flight or InFlight(4), remat=remat
    )
    answer = solve_load(problem, LoadOptions(time_limit=10))
    return problem, answer, plan_stages(profile, problem, answer, groups)


def steady_state(profile, stages, *, micro_batch):
    """Seconds per micro-batch between 40 and 80 micro-batches under GPipe, simulated."""

    def step_s(micro_batches):
        batch = micro_batch * micro_batches
        plan = Plan(
            workload=replace(profile.workload, batch_size=batch), micro_batches=micro_batches,
            micro_batch_size=micro_batch, stages=stages,
        )  # fmt: skip
        return predict(plan, profile).step_s

    return (step_s(80) - step_s(40)) / 40


@pytest.mark.parametrize("slowness", [[1.0, 2.0], [1.0, 1.0, 3.5]])
def test_the_value_is_the_simulated_steady_state(slowness):
    """Each micro-batch more takes as long as the largest load, as both ways have the same slowest server."""
    profile = make_profile(work=WORK, slowness=slowness)
    _, answer, stages = solved(profile)
    assert answer.gap < 1e-6
    assert steady_state(profile, stages, micro_batch=2) == pytest.approx(answer.value, rel=1e-3)


def test_a_slow_link_is_the_load_that_counts():
    """Where links are slow the largest load is a link's, and it is proven for a chain."""
    profile = make_profile(work=WORK, slowness=[1.0, 1.0, 1.0], latency=5e-3)
    problem, answer, _ = solved(profile)
    assert answer.gap < 1e-6
    found = evaluate(problem, answer.stages)
    assert max(found.links.values(), default=0.0) <= answer.value
    fast = solved(make_profile(work=WORK, slowness=[1.0, 1.0, 1.0]))[1]
    assert fast.value <= answer.value


def test_memory_is_what_the_cost_model_says():
    """For every stage of a solved graph with remat, ties and skips the bytes agree."""
    profile = make_profile(
        work=WORK, slowness=[1.0, 2.0, 1.5], edges=SKIPS, activation=3e6, parameters=2e6, capacity=3.2e7
    )
    profile = replace(profile, ties=(Tie("w", ("p0", "p5"), 1e6), Tie("v", ("p1", "p2"), 5e5)))
    problem, answer, stages = solved(profile, in_flight=InFlight(4, from_end=True))
    cost, found = CostModel(profile), evaluate(problem, answer.stages)
    assert any(stage.rematerialise for stage in stages)
    for s, stage in enumerate(stages):
        depth = min(4, len(stages) - s)
        said = cost.memory(stage.worker, [(stage.partitions, stage.rematerialise, depth)], 2)
        assert found.memory[s] == pytest.approx(said.total)


def test_pins_labels_and_wishes_are_kept():
    """Pins, `colocate`, `apart` and `rematerialise` of the profile hold in the plan."""
    profile = make_profile(work=WORK, slowness=[1.0, 1.0, 4.0])
    wishes = {
        "p0": {"pin": "worker:2"}, "p2": {"colocate": "a"}, "p3": {"colocate": "a", "rematerialise": "always"},
        "p4": {"apart": "b"}, "p5": {"apart": "b"},
    }  # fmt: skip
    profile = replace(
        profile, partitions=tuple(replace(each, **wishes.get(each.name, {})) for each in profile.partitions)
    )
    _, answer, stages = solved(profile)
    home = {name: stage.worker for stage in stages for name in stage.partitions}
    assert answer.gap < 1e-6
    assert home["p0"].startswith("worker:2")
    assert home["p2"] == home["p3"]
    assert home["p4"] != home["p5"]
    assert [name for stage in stages for name in stage.rematerialise] == ["p3"]


def test_always_rematerialises_everything():
    """`remat="always"` leaves no choice."""
    _, _, stages = solved(make_profile(work=WORK, slowness=[1.0, 2.0]), remat="always")
    assert all(stage.rematerialise == stage.partitions for stage in stages)


def test_stages_follow_the_order_of_the_graph():
    """Partitions come in topological order along the line."""
    profile = make_profile(work=WORK, slowness=[1.0, 1.2, 1.4], edges=SKIPS)
    _, answer, stages = solved(profile)
    placed = list(itertools.chain.from_iterable(stage.partitions for stage in stages))
    assert placed == list(profile.order)
    assert answer.gap < 0.05
