"""Plans of profiles whose links share wires: bounds are of prices without them, and what is answered of those with."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from brute_force import random_instance
from builders import make_profile
from drawn_plans import with_wires

from assigner.formats.profile import Profile, Wire, WireLink
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import compared_value, objective_value
from assigner.schedule.simulate import predict, step_s
from assigner.solver import SolveOptions, solve
from assigner.solver.export import export_model
from assigner.solver.orders.search import best_orders, named_orders
from assigner.solver.orders.tasks import PlacedTasks
from assigner.solver.search.search import Search
from assigner.solver.whatif import price_what_ifs


def slow_wires(seed: int, *, workers: int = 4, partitions: int = 5, batch: int = 4) -> Profile:
    """A chain or a graph whose messages take about as long as its partitions; all links of a wire are slower."""
    rng = random.Random(seed)
    chain = [(i, i + 1) for i in range(partitions - 1)]
    profile = make_profile(
        work=[rng.uniform(1e-3, 4e-3) for _ in range(partitions)],
        slowness=[rng.choice([1.0, 1.5]) for _ in range(workers)],
        edges=[*chain, (0, 2), (1, 4)] if seed % 3 == 0 else chain,
        bandwidth=rng.choice([3e7, 6e7]), batch=batch, busy=0.1 * (seed % 2),
    )  # fmt: skip
    if seed % 2:
        return with_wires(profile, seed)
    everything = tuple(WireLink(link.source, link.target) for link in profile.links)
    return replace(profile, wires=(Wire(everything, float(len(everything))),))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "seed"),
    [("auto", 0), ("auto", 1), ("gpipe", 0), ("gpipe", 1), ("1f1b", 0), ("1f1b", 2), ("interleaved", 2),
     ("interleaved", 3), ("listed", 1)],
)  # fmt: skip
def test_no_baseline_is_faster_and_no_plan_below_the_bound(schedule: str, seed: int) -> None:
    """By prices with wires, which are the prediction's; "optimal" is what the bound, without them, allows."""
    profile = slow_wires(seed)
    plan = solve(profile, SolveOptions(schedule=schedule)).plan
    assert plan.solver
    assert plan.predicted
    assert plan.predicted.step_s == predict(plan, profile).step_s == step_s(plan, CostModel(profile))
    assert plan.solver.objective_s == pytest.approx(plan.predicted.step_s, rel=1e-6)
    assert plan.solver.bound_s <= plan.predicted.step_s * (1 + 1e-9)
    assert plan.solver.status != "optimal" or plan.predicted.step_s <= plan.solver.bound_s / (1 - 0.0101)
    if schedule == "auto":
        baselines = [each.step_s for each in plan.baselines if each.step_s is not None]
        assert baselines
        assert plan.predicted.step_s <= min(baselines) * (1 + 1e-6)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", range(4))
def test_other_objectives_too(seed: int, objective: str) -> None:
    """What is told of the plan is its value with wires, and no less than the bound."""
    profile = slow_wires(seed)
    plan = solve(profile, SolveOptions(objective=objective, max_replicas=1)).plan
    assert plan.solver
    assert plan.predicted
    cost = CostModel(profile)
    value = objective_value(plan, plan.objective, cost, step_s=plan.predicted.step_s)
    assert plan.solver.objective_s == pytest.approx(value, rel=1e-6)
    assert plan.solver.bound_s <= value * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_solved_orders_are_never_worse_than_the_rules(seed: int) -> None:
    """Of the placement that a search finds, by prices with wires."""
    profile = slow_wires(seed)
    plan = solve(profile, SolveOptions(schedule="interleaved", max_replicas=1)).plan
    tasks = PlacedTasks(plan, CostModel(profile))
    named = [orders for _, orders in named_orders(plan, tasks) if tasks.fits(orders)]
    found = best_orders(tasks, named, most=5_000)
    assert found
    assert found.step_s == tasks.step_s(found.orders) <= min(map(tasks.step_s, named))
    assert found.bound_s <= found.step_s


@pytest.mark.long
def test_of_plans_looked_at_the_best_with_wires_is_taken() -> None:
    """A search without wires ends with each setting's best plan with them: never worse than the one it was after."""
    better = 0
    for seed in range(5):
        profile = slow_wires(seed)
        options = SolveOptions(schedule="auto", max_replicas=1)
        with_, without = (Search(each, options) for each in (profile, replace(profile, wires=())))
        with_.run()
        without.run()
        cost = CostModel(profile)
        for mine, other in zip(with_.candidates, without.candidates, strict=True):
            if other.best is not None:
                assert mine.best
                value = compared_value(other.best.plan, "step", cost, step_s=step_s(other.best.plan, cost))
                assert mine.best_value <= value * (1 + 1e-9)
                assert mine.bound == pytest.approx(other.bound)
                better += mine.best_value < value * (1 - 1e-6)
    assert better


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"objective": "throughput"}], ids=str)
def test_of_like_workers_those_are_taken_whose_links_share_no_wire(options: dict[str, Any]) -> None:
    """The first two of four like workers have one wire for both ways, the others one for each way."""
    profile = make_profile(work=[4e-3] * 2, slowness=[1.0] * 4, bandwidth=1e7)
    like = tuple(replace(worker, kind="one") for worker in profile.workers)
    names = [worker.name for worker in like]
    wire = Wire((WireLink(*names[:2]), WireLink(*names[1::-1])), 2.0)
    profile = replace(profile, workers=like)
    asked = SolveOptions(max_workers=2, max_replicas=1, micro_batches=8, **options)
    with_, without = (solve(each, asked).plan for each in (replace(profile, wires=(wire,)), profile))
    assert with_.solver
    assert without.solver
    assert set(without.workers) == set(names[:2]) != set(with_.workers)
    assert with_.solver.objective_s == pytest.approx(without.solver.objective_s)


@pytest.mark.parametrize("seed", [0, 3])
def test_listed_orders_go_with_workers_that_are_exchanged(seed: int) -> None:
    """A what-if begins with the plan at hand, in whatever order its workers work."""
    profile = with_wires(random_instance(seed, partitions=4, workers=3, alike=True), seed)
    options = SolveOptions(schedule="listed", micro_batches=2)
    found = solve(profile, options)
    assert found.plan.orders
    answers = price_what_ifs(found, profile, options).plan.what_if
    assert {each.change for each in answers} >= {"worker", "link"}
    most = found.plan.predicted_step_s
    assert most is not None
    assert all(each.step_s is not None and each.step_s <= most for each in answers if each.change != "micro_batches")


def test_an_exported_model_says_that_it_knows_no_shared_wires(tmp_path) -> None:
    """Its optimum is the least step time with a wire for each link."""
    profile = slow_wires(2)
    options = SolveOptions(schedule="gpipe", max_replicas=1, gap=0.0)
    plan = solve(profile, options).plan
    written = export_model(plan, profile, options, tmp_path / "model.lp")
    assert written.scope.endswith("as if no links shared a wire")
    assert plan.predicted
    assert written.optimum_s is not None
    assert written.optimum_s <= plan.predicted.step_s * (1 + 1e-9)
