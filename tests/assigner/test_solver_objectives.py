"""1F1B, throughput, latency and cost: exhaustive search says that the plan is the best there is."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from brute_force import best_plan, random_instance
from builders import make_plan, make_profile, single
from every_placement import best_of_all
from sweeps import sweep

from assigner.errors import InfeasibleError, UsageError
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import latency_s, money_per_sample, steady_s, sustained_s
from assigner.schedule.simulate import overfull, predict
from assigner.solver import solve
from assigner.solver.problem.objectives import GPipeStep

EXACT = 1e-6
BOTH = ("gpipe", "1f1b")


def draw(seed: int, *, graph: bool = False):
    rng = random.Random(seed)
    return random_instance(
        seed, partitions=rng.choice([3, 4]), workers=rng.choice([2, 3]), busy=rng.random() < 0.5,
        tight=rng.random() < 0.6, missing=rng.choice([0, 0, 0.3]), pins=rng.random() < 0.3,
        late_updates=rng.random() < 0.3, alike=rng.random() < 0.3, graph=graph,
    )  # fmt: skip


def flows(plan):
    """No stage warms up with fewer micro-batches than 1F1B has it where they do not end: the pipeline stays full."""
    return plan.micro_batches >= len(plan.stages) and all(
        stage.in_flight is None or stage.in_flight >= len(plan.stages) - n for n, stage in enumerate(plan.stages)
    )


def check(profile, options, **how):
    best = best_plan(profile, **how)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(profile, options)
        return
    plan = solve(profile, options).plan
    assert plan.solver.objective_s == pytest.approx(best[0], rel=EXACT)
    assert plan.solver.bound_s == pytest.approx(best[0], rel=EXACT)
    assert plan.solver.status == "optimal"
    assert plan.objective == options.objective
    assert not overfull(predict(plan, profile))


@pytest.mark.parametrize("seed", sweep([0, 1, 3, 5, 6, 9, 11, 19, 20, 23], quick=[0, 3, 5, 9, 11, 20, 23]))
def test_one_f_one_b_with_every_warm_up_depth(seed):
    """Over all pipelines, remat subsets and warm-up depths, no 1F1B plan is faster."""
    check(draw(seed), single(schedule="1f1b", gap=0), schedules=("1f1b",))


def test_what_is_told_of_a_throughput_compares_between_micro_batch_counts():
    """The bound is below what any count has by itself: all are seconds of a batch."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1, 2], batch=8)
    found = solve(profile, single(objective="throughput")).plan
    assert [each.objective_s for each in found.candidates if each.status == "chosen"] == [found.solver.objective_s]
    for count in (2, 4, 8):
        plan = solve(profile, single(objective="throughput", micro_batches=count)).plan
        assert plan.solver.objective_s >= found.solver.bound_s * (1 - EXACT)


def check_graph(profile, options, **how):
    """Of graphs with branches the search knows more stages than the intervals tried here, and may prove less."""
    best = best_plan(profile, **how)
    if best is None:
        return
    plan = solve(profile, options).plan
    assert plan.solver.objective_s <= best[0] * (1 + EXACT)
    assert plan.solver.bound_s <= plan.solver.objective_s
    if plan.solver.status == "optimal":
        assert plan.solver.bound_s == pytest.approx(plan.solver.objective_s, rel=EXACT)
    assert not overfull(predict(plan, profile))


@pytest.mark.parametrize("seed", sweep(range(100, 108), quick=5))
def test_one_f_one_b_on_graphs(seed):
    """Skips and branches: nothing that exhaustive search finds in the order of the graph is faster."""
    check_graph(draw(seed, graph=True), single(schedule="1f1b", gap=0), schedules=("1f1b",))


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", sweep(range(8), quick=6))
def test_throughput_and_latency(seed, objective):
    """The least steady-state time and the least forward, over both schedules and what each has room for."""
    options = single(schedule=BOTH[seed % 2], objective=objective, gap=0)
    keeps = flows if objective == "throughput" else lambda _: True
    check(draw(seed), options, schedules=(BOTH[seed % 2],), objective=objective, keeps=keeps)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", sweep(range(200, 204), quick=3))
def test_throughput_and_latency_of_graphs(seed, objective):
    """Of graphs too."""
    options = single(schedule="1f1b", objective=objective, gap=0)
    keeps = flows if objective == "throughput" else lambda _: True
    check_graph(draw(seed, graph=True), options, schedules=("1f1b",), objective=objective, keeps=keeps)


def priced(profile, seed: int):
    rng = random.Random(seed)
    workers = tuple(replace(worker, cost_per_hour=rng.choice([1, 2, 5, 10])) for worker in profile.workers)
    return replace(profile, workers=workers)


@pytest.mark.parametrize("seed", sweep(range(10), quick=8))
def test_the_cheapest_plan_within_a_step_time(seed):
    """No plan that meets the step time costs less; where none meets it, that is said."""
    profile = priced(draw(seed), seed)
    fastest = best_plan(profile)
    if fastest is None:
        return
    within = fastest[0] * [0.9, 1.05, 1.5, 100.0][seed % 4]
    options = single(objective="cost", schedule="gpipe", max_step_s=within, gap=0)
    check(profile, options, objective="cost", within=within)


def of_workers(profile, names):
    """The profile of some of its workers."""
    return replace(
        profile,
        workers=tuple(each for each in profile.workers if each.name in names),
        links=tuple(each for each in profile.links if {each.source, each.target} <= {*names}),
        measurements=tuple(each for each in profile.measurements if each.worker in names),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("seed", sweep(range(34, 38), quick=2))
def test_the_cheapest_placement_of_a_graph(seed, schedule):
    """Branches, and several stages a worker: no plan on any choice of workers costs less, and that is proven."""
    profile = priced(random_instance(seed, partitions=4, workers=2, batch=2, graph=True), seed)
    least = math.inf
    for taken in itertools.chain.from_iterable(itertools.combinations(profile.workers, n) for n in (1, 2)):
        found = best_of_all(of_workers(profile, {each.name for each in taken}), schedule=schedule)
        if found is not None:
            hourly = sum(each.cost_per_hour for each in taken)
            least = min(least, hourly / 3600 * found[0] / profile.workload.batch_size)
    plan = solve(profile, single(objective="cost", schedule=schedule, gap=0)).plan
    assert plan.solver.objective_s == pytest.approx(least, rel=EXACT)
    assert plan.solver.bound_s == pytest.approx(least, rel=EXACT)
    assert plan.schedule == schedule


@pytest.mark.parametrize("seed", sweep(range(0, 10, 2), quick=2))
def test_the_frontier_has_no_plan_that_another_beats(seed):
    """From the cheapest to the fastest plan, money rises and step time falls; its ends are the best of either."""
    profile = priced(draw(seed), seed)
    fastest, cheapest = best_plan(profile), best_plan(profile, objective="cost")
    if fastest is None or cheapest is None:
        return
    frontier = solve(profile, single(objective="cost", schedule="gpipe", gap=0)).frontier
    assert [point.money for point in frontier] == sorted(point.money for point in frontier)
    assert [point.step_s for point in frontier] == sorted((point.step_s for point in frontier), reverse=True)
    assert frontier[0].money == pytest.approx(cheapest[0], rel=EXACT)
    assert frontier[-1].step_s == pytest.approx(fastest[0], rel=EXACT)
    assert [point.chosen for point in frontier] == [True] + [False] * (len(frontier) - 1)


def test_cost_needs_prices():
    """A worker without a price is named, with the flag that gives one."""
    with pytest.raises(UsageError, match="cost_per_hour") as caught:
        solve(make_profile(work=[1e-3] * 2, slowness=[1.0]), single(objective="cost"))
    assert "--price" in caught.value.hint


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_pipeline_over_a_missing_link_costs_inf(micro_batches):
    """Of one micro-batch, too, where none waits for the slowest server: numpy has no value of 0 times inf."""
    marks = np.zeros((len(GPipeStep.nothing), 1))
    marks[:4] = math.inf
    assert GPipeStep(micro_batches).whole(marks).tolist() == [math.inf]


def test_values_of_a_plan_by_hand():
    """Two stages of 1 and 2 ms forward, twice that backward, and messages of 1 ms: the three values in seconds."""
    profile = make_profile(work=[1e-3, 2e-3], slowness=[1.0, 1.0], edge_bytes=9e5, bandwidth=1e9, latency=1e-4, batch=4)
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.8) for each in profile.workers))
    plan = solve(profile, single(micro_batches=4, schedule="gpipe", gap=0)).plan
    cost = CostModel(profile)
    assert len(plan.stages) == 2
    assert steady_s(plan, cost) == pytest.approx(6e-3)
    assert latency_s(plan, cost) == pytest.approx(1e-3 + cost.transfer_s(*plan.workers, 9e5) + 2e-3)
    assert money_per_sample(plan, cost, step_s=0.5) == pytest.approx(3.6 / 3600 * 0.5 / 4)


@pytest.mark.parametrize("seed", range(6))
def test_more_micro_batches_take_no_less_than_the_steady_state(seed):
    """Each one more, under either schedule and any depths; and where links are fast 1F1B takes what it says."""
    profile = random_instance(seed, partitions=5, workers=3, busy=seed % 2 == 0)
    cost = CostModel(profile)
    for stages in ([(0, 2), (2, 5)], [(0, 1), (1, 3), (3, 5)], [(0, 5)]):
        held = [(n, profile.order[first:last]) for n, (first, last) in enumerate(stages)]
        for schedule in BOTH:
            plan = replace(make_plan(profile, held), schedule=schedule)
            assert sustained_s(plan, cost) >= steady_s(plan, cost) * (1 - 1e-9)
    fast = make_profile(work=[2e-3] * 4, slowness=[1, 2], bandwidth=1e12, latency=1e-9)
    plan = replace(make_plan(fast, [(0, ["p0", "p1", "p2"]), (1, ["p3"])]), schedule="1f1b")
    assert sustained_s(plan, CostModel(fast)) == pytest.approx(steady_s(plan, CostModel(fast)), rel=1e-5)


def test_gpipe_has_a_slowest_worker_for_forwards_and_one_for_backwards():
    """Two workers, of which one is slow forwards and the other backwards."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 1], bandwidth=1e12, latency=1e-9)
    seconds = {"p0": (3e-3, 1e-3), "p1": (1e-3, 3e-3)}
    profile = replace(
        profile,
        measurements=tuple(
            replace(each, forward_s=seconds[each.partition][0], backward_s=seconds[each.partition][1])
            for each in profile.measurements
        ),
    )
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=8)
    cost = CostModel(profile)
    assert steady_s(plan, cost) == pytest.approx(4e-3, rel=1e-4)
    assert sustained_s(plan, cost) == pytest.approx(6e-3, rel=1e-4)
