"""The knapsack of rematerialisation equals trying every subset."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from builders import make_profile, single
from sweeps import sweep

from assigner.schedule.cost import CostModel
from assigner.solver.fleet.option_arrays import HopArrays, OptionArrays
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.pipelines.share_search import ShareSearch
from assigner.solver.pipelines.shared import SharedCandidate
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.interval_prices import IntervalBytes
from assigner.solver.problem.memory import HeldPartitions, least_remat
from assigner.solver.problem.options import SolveOptions
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.stage_options import exactness
from assigner.solver.search.search import Search
from assigner.solver.solve import solve


def every_subset(activations, forwards, in_flight, room):
    count = range(len(activations))
    fitting = [
        sum(forwards[i] for i in chosen)
        for k in range(len(activations) + 1)
        for chosen in itertools.combinations(count, k)
        if in_flight * sum(activations[i] for i in count if i not in chosen)
        + max((activations[i] for i in chosen), default=0) <= room
    ]  # fmt: skip
    return min(fitting, default=None)


def least(sizes, seconds, *, in_flight, room, **nodes):
    """`least_remat` of partitions that keep so many bytes, and take so many seconds to run again."""
    both = zip(sizes, seconds, strict=True)
    costs = [SimpleNamespace(activation_bytes=size, recompute_s=each) for size, each in both]
    return least_remat(HeldPartitions(tuple(costs), [None] * len(costs), room, 0.0), in_flight, **nodes)


@pytest.mark.parametrize("seed", range(150))
def test_the_cheapest_subset_that_fits(seed):
    """Least added forward time over all subsets, ties and zeros included; None where nothing fits."""
    rng = random.Random(seed)
    n = rng.randrange(1, 9)
    sizes = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(n)] if seed % 2 else [rng.uniform(0, 9) for _ in range(n)]
    forwards = [rng.choice([0, 1, 2, 4]) if seed % 3 else rng.uniform(0, 5) for _ in range(n)]
    in_flight = rng.choice([1, 2, 4, 8])
    room = rng.uniform(-0.1, 1.1) * in_flight * sum(sizes)
    best = every_subset(sizes, forwards, in_flight, room)
    found = least(sizes, forwards, in_flight=in_flight, room=room)
    assert (found is None) == (best is None)
    if found is not None:
        assert sum(forwards[i] for i in found.positions) == found.seconds == found.floor_s == pytest.approx(best)
        stored = sum(size for i, size in enumerate(sizes) if i not in found.positions)
        assert in_flight * stored + max((sizes[i] for i in found.positions), default=0) <= room * (1 + 1e-12)


def test_nothing_is_rematerialised_where_everything_fits():
    """Room for all: the empty choice, not a free one of zero cost."""
    assert least([1.0, 1.0], [0.0, 0.0], in_flight=2, room=4.0).positions == ()


def test_many_equal_blocks_are_chosen_at_once():
    """Sixty alike partitions are decided by count, not by trying their subsets."""
    found = least([2.0] * 60, [1.0 + i * 1e-6 for i in range(60)], in_flight=4, room=300.0)
    assert found.positions == tuple(range(23))


def knapsack(n, noise, seed=0):
    """Activations, and recomputes that take about as long per byte."""
    rng = random.Random(f"{n} {noise} {seed}")
    sizes = [rng.uniform(1e6, 9e6) for _ in range(n)]
    return sizes, [size * 1e-9 * (1 + rng.uniform(-noise, noise)) for size in sizes]


@pytest.mark.parametrize(("noise", "in_flight"), [(0.0, 2), (0.0, 4), (1e-2, 2), (0.1, 8)])
def test_a_search_that_is_cut_off_has_a_floor(noise, in_flight):
    """The choice fits, no choice adds less than the floor, and it says that it may not be the best."""
    sizes, seconds = knapsack(16, noise)
    room = 0.5 * in_flight * sum(sizes)
    best = least(sizes, seconds, in_flight=in_flight, room=room, nodes=10**7)
    few = least(sizes, seconds, in_flight=in_flight, room=room, nodes=20)
    assert best.exact
    assert not few.exact
    assert few.floor_s <= best.seconds <= few.seconds == pytest.approx(sum(seconds[i] for i in few.positions))
    assert few.exactness(1.0) * (1.0 + few.seconds) <= (1.0 + best.seconds) * (1 + 1e-12)
    stored = sum(size for i, size in enumerate(sizes) if i not in few.positions)
    assert in_flight * stored + max(sizes[i] for i in few.positions) <= room * (1 + 1e-12)


def test_the_floor_of_items_of_about_one_size_goes_by_their_number():
    """By bytes the last of them counts in part only, which leaves out most of it where few are enough."""
    rng = random.Random(12)
    sizes, seconds = ([1 + rng.uniform(-noise, noise) for _ in range(20)] for noise in (0.05, 0.005))
    found = least(sizes, seconds, in_flight=4, room=3.3 * sum(sizes), nodes=60)
    assert len(found.positions) == 4
    assert sum(sorted(seconds)[:4]) * (1 - 1e-12) <= found.floor_s


def test_no_floor_of_a_search_is_below_the_bound_of_many_at_once(monkeypatch):
    """What is settled by a search that was cut off keeps the bound that was there before, if that is more."""
    monkeypatch.setattr(tuning, "KNAPSACK_NODES", 0)
    rng = random.Random(1)
    sizes = [1e6 * (1 + rng.uniform(0, 0.2)) for _ in range(16)]
    profile = make_profile(work=[1e-3 * (1 + rng.uniform(-5e-3, 5e-3)) for _ in sizes], slowness=(1.0,), capacity=1e12)
    points = [replace(m, activation_bytes=sizes[int(m.partition[1:])] * m.micro_batch) for m in profile.measurements]
    workers = [replace(each, memory_bytes=16 * 4e6 + 6.5 * sum(sizes)) for each in profile.workers]
    profile = replace(profile, measurements=tuple(points), workers=tuple(workers))
    table = Problem(profile, single(), CostModel(profile)).prices(4).intervals
    arrays = OptionArrays(table, table.kinds, 16, HopArrays(table))
    before = arrays.backward.copy()
    open_ = np.argwhere(~arrays.settled)
    assert len(open_)
    for kind, first, length in open_:
        arrays.settle(kind, first, length + 1)
    assert (arrays.backward >= before).all()
    assert arrays.settled.all()


@pytest.mark.parametrize("n", [24, 1_100])
def test_a_subset_sum_ends_with_its_nodes(n):
    """As many seconds per byte everywhere: no bound prunes it, and no stage is too deep for it."""
    sizes, seconds = knapsack(n, 0.0)
    found = least(sizes, seconds, in_flight=4, room=2 * sum(sizes))
    assert found.seconds * (1 - 1e-3) < found.floor_s < found.seconds


def subset_sum(n, *, noise=0.0, seed=0, room=1.4, slowness=(1.0,), edges=None):
    """A chain, or a graph, on workers that have room for a part of what it keeps of four micro-batches."""
    sizes, seconds = knapsack(n, noise, seed)
    profile = make_profile(work=seconds, slowness=slowness, capacity=1e12, edges=edges)
    points = [replace(m, activation_bytes=sizes[int(m.partition[1:])] * m.micro_batch) for m in profile.measurements]
    workers = [replace(each, memory_bytes=n * 4e6 + room * sum(sizes)) for each in profile.workers]
    return replace(profile, measurements=tuple(points), workers=tuple(workers))


def test_a_gap_is_reached_in_spite_of_a_floor():
    """A floor that lies well within the gap asked for does not keep a plan from being proven to be within it."""
    together = (tuple(f"p{i}" for i in range(40)),)
    options = SolveOptions(schedule="gpipe", micro_batches=4, together=together, gap=0.01, time_limit=20.0)
    report = solve(subset_sum(40), options).plan.solver
    assert report.status == "optimal"
    assert report.objective_s * 0.99 <= report.bound_s < report.objective_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_what_is_proven_goes_by_the_floor(schedule, monkeypatch):
    """Where knapsacks were cut off, the bound is not above the best plan that there is: a worse one is not optimal."""
    options = SolveOptions(schedule=schedule, micro_batches=4, max_replicas=1, gap=0, time_limit=20.0)
    best = solve(subset_sum(10), options).plan
    monkeypatch.setattr(tuning, "KNAPSACK_NODES", 20)
    monkeypatch.setattr(tuning, "KNAPSACK_NEAR", 0.5)
    rough = solve(subset_sum(10), options).plan
    assert best.solver.status == "optimal"
    assert rough.solver.status == "feasible"
    assert rough.solver.bound_s <= best.solver.bound_s < rough.solver.objective_s


ASKED = (
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved"},
    {"schedule": "one-stage", "max_replicas": 3},
    {"schedule": "1f1b", "objective": "throughput"},
    {"schedule": "gpipe", "branched": True},
    {"schedule": "1f1b", "objective": "throughput", "branched": True},
)
BRANCHED = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]


@pytest.mark.parametrize("seed", sweep(range(70), quick=14))
def test_no_bound_is_above_a_plan_that_there_is(seed, monkeypatch):
    """However soon knapsacks are cut off: of one worker a stage and of several, alike or not, of one stage and more."""
    rng, asked = random.Random(seed), {"max_replicas": 1, **ASKED[seed % len(ASKED)]}
    edges = BRANCHED if asked.pop("branched", False) else None
    profile = subset_sum(
        7, noise=rng.choice([0.0, 1e-3, 0.1]), seed=seed, room=rng.uniform(0.7, 1.4), edges=edges,
        slowness=rng.choice([(1.0,) * 2, (1.0,) * 3, (1.0, 1.5), (1.0, 1.0, 1.5)]),
    )  # fmt: skip
    options = SolveOptions(micro_batches=4, gap=0, time_limit=20.0, **asked)
    best = solve(profile, options).plan.solver
    monkeypatch.setattr(tuning, "COUNTED_SIZES", rng.choice([0, 3]))
    monkeypatch.setattr(tuning, "KNAPSACK_NODES", rng.randint(3, 20))
    monkeypatch.setattr(tuning, "KNAPSACK_NEAR", 0.5)
    rough = solve(profile, options).plan.solver
    assert rough.bound_s <= best.objective_s * (1 + 1e-9)
    assert best.bound_s <= rough.objective_s * (1 + 1e-9)
    if rough.status == best.status == "optimal":
        assert rough.objective_s == pytest.approx(best.objective_s, rel=1e-6)


def test_that_no_plan_is_below_a_value_is_proven_by_floors(monkeypatch):
    """Where the least that stages may take is above it, a candidate is decided, though knapsacks were cut off."""
    monkeypatch.setattr(tuning, "KNAPSACK_NODES", 20)
    profile = subset_sum(8, slowness=(1.0, 1.0))
    options = SolveOptions(schedule="gpipe", micro_batches=4, max_replicas=1, gap=0)
    best = solve(profile, options).plan.solver
    assert best.bound_s < best.objective_s
    search = Search(*resolve(profile, options))
    search.state.cutoff = best.bound_s * (1 - 1e-3)
    search.run()
    assert search.decided
    assert search.bound == pytest.approx(search.state.cutoff)


def test_a_loose_bound_of_one_stage_is_no_other_stage_s():
    """Knapsacks are cut off, yet none of those that count for the best plan: it is proven to be."""
    profile = subset_sum(16, slowness=(1.0, 1.0), room=0.9)
    options = SolveOptions(schedule="1f1b", micro_batches=4, max_replicas=1, time_limit=20.0)
    problem = Problem(profile, options, CostModel(profile))
    assert min(each.exactness for each in problem.prices(4).intervals.one_f_one_b.all) < 1
    report = solve(profile, options).plan.solver
    assert report.bound_s == pytest.approx(report.objective_s, rel=1e-6)


def test_a_cut_off_search_of_one_stage_leaves_a_bound_beside_a_shared_one(monkeypatch):
    """The steady state of a pipeline with both is known to within what the one stage may be spared."""
    monkeypatch.setattr(tuning, "KNAPSACK_NODES", 3)
    monkeypatch.setattr(tuning, "KNAPSACK_NEAR", 0.5)
    options = SolveOptions(schedule="1f1b", objective="throughput", micro_batches=4, max_replicas=2)
    search = Search(*resolve(subset_sum(8, slowness=(1.0, 1.0, 1.0), room=0.9), options))
    candidate = next(each for each in search.candidates if isinstance(each, SharedCandidate))
    pipeline = candidate.plans.pipeline_of([(0, 0), (4, list(candidate.options.sets).index((0, 0)))])
    share = exactness(pipeline)
    least = ShareSearch(candidate, 10**6).least(pipeline)
    assert share < 1
    assert candidate.best_value * share * (1 - 1e-9) <= least < candidate.best_value


def test_what_a_stage_rematerialises_is_soon_found_once_the_time_is_over():
    """It fits, and what it takes, and is known to take at least, lie on both sides of the best."""
    profile = subset_sum(10)
    cost = CostModel(profile)
    best, hasty = (
        Problem(profile, single(), cost, clock=SolveClock(limit)).prices(4).intervals.gpipe.find(0, 9, 0)
        for limit in (60.0, 0.0)
    )
    assert best.exactness == 1 > hasty.exactness
    assert hasty.backward_s <= best.backward_s <= hasty.backward_s / hasty.exactness


def test_messages_between_partitions_that_others_stand_between():
    """Of partitions that nothing connects, another order has some between a value and its reader: it still leaves."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0], edges=[(0, 1)])
    cost = CostModel(profile)
    problem = Problem(profile, single(), cost, sequence=("p0", "p2", "p1"))
    _, _, messages = IntervalBytes(problem, 2).of(0, 1)
    (output,) = cost.outputs
    assert messages == 2 * cost.output_bytes(output, 2)  # and its gradient comes back
