"""Stages that several workers share: exhaustive search over every set of workers and every share bounds the answer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import random_instance
from builders import make_profile, worker_name
from shared_placements import best_shared
from sweeps import sweep

from assigner.errors import InfeasibleError, UsageError
from assigner.formats.plan import Plan
from assigner.formats.profile import Collective, LinkPoint, Tie
from assigner.formats.stage import Replica, Stage
from assigner.report.plan import status
from assigner.report.sharing import sharing
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict, step_s
from assigner.solver import SolveOptions, completing, solve, solve_baseline
from assigner.solver.export import check_exportable
from assigner.solver.orders.bounds import least_of_all_s
from assigner.solver.pipelines.shared import SharedCandidate
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.options import divisors
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.replica_options import ReplicaOptions, least_shares, replica_sets
from assigner.solver.search.search import Search

ROUNDING = 1e-6


def draw(seed: int, **how):
    rng = random.Random(seed)
    partitions, workers = rng.choice([(2, 3), (3, 3), (3, 2), (2, 4)])
    return random_instance(
        seed, partitions=partitions, workers=workers, busy=rng.random() < 0.4, tight=rng.random() < 0.3,
        missing=rng.choice([0, 0, 0.3]), late_updates=rng.random() < 0.2, alike=rng.random() < 0.3, **how,
    )  # fmt: skip


def wide(**how):
    """A chain on workers whose links cost next to nothing: sharing everything is as good as it can be."""
    links = {"bandwidth": 1e11, "latency": 1e-7, "edge_bytes": 1e3}
    return make_profile(**{"parameters": 4e5, "batch": 16, **links, **how})


def shared(plan):
    """The workers of each stage by rank, with their shares."""
    return [
        {int(each.worker.split(":")[1].split("/")[0]): each.micro_batches for each in stage.replicas} or
        int(stage.worker.split(":")[1].split("/")[0])
        for stage in plan.stages
    ]  # fmt: skip


def check(profile, options, *, near, **how):
    """The bound is below every plan there is, and no plan is far below the one found.

    Those that are looked at divide no optimizer state: a plan that does may be faster, or the only one that fits.
    """
    best = best_shared(profile, **how)
    try:
        plan = solve(profile, options).plan
    except InfeasibleError:
        assert best is None
        return
    divided = any(each.updates is not None for stage in plan.stages for each in stage.replicas)
    value, bound = plan.solver.objective_s, plan.solver.bound_s
    least = min(best[0] if best else np.inf, value if divided else np.inf)
    assert bound <= least * (1 + ROUNDING)
    assert least * (1 - ROUNDING) <= value <= least * (1 + near)
    assert not overfull(predict(plan, profile))


@pytest.mark.parametrize("seed", sweep([2, 3, 4, 5, 6, 7, 9, 13], quick=[2, 5, 7, 13]))
def test_no_plan_is_below_the_bound(seed):
    """Over all cuts, sets of workers, shares, warm-up depths and remat subsets, under both schedules."""
    check(draw(seed), SolveOptions(schedule="one-stage", gap=0), near=ROUNDING, remat=True)


@pytest.mark.parametrize("seed", sweep(range(50, 57), quick=3))
def test_gpipe_with_every_share(seed):
    """The same under GPipe alone."""
    how = {"schedules": ("gpipe",), "remat": True}
    check(draw(seed), SolveOptions(gap=0, schedule="gpipe"), near=ROUNDING, **how)


def slow_links(seed: int):
    """Four workers whose messages take twice as long as usual: where several of a stage send at once, the order tells.

    Under GPipe some of them take less than under 1F1B at any depth.
    """
    profile = random_instance(seed, partitions=3, workers=4, busy=True)
    links = tuple(
        replace(link, points=tuple(replace(each, seconds=2 * each.seconds) for each in link.points))
        for link in profile.links
    )
    return replace(profile, links=links)


@pytest.mark.long
@pytest.mark.parametrize("seed", sweep([0, 3, 41, 44, 51, 78], quick=[0, 41, 44, 51]))
def test_an_open_schedule_is_gpipe_too(seed):
    profile = slow_links(seed)
    gpipe = solve(profile, SolveOptions(schedule="gpipe", gap=0.0)).plan.solver
    for schedule in ("one-stage", "auto"):
        found = solve(profile, SolveOptions(schedule=schedule, gap=0.0)).plan.solver
        assert found.objective_s <= gpipe.objective_s * (1 + ROUNDING)
        assert found.bound_s <= gpipe.objective_s * (1 + ROUNDING)


@pytest.mark.long
def test_a_step_time_that_only_gpipe_meets_is_met():
    profile = slow_links(44)
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    gpipe = solve(profile, SolveOptions(schedule="gpipe", gap=0.0)).plan
    cheap = solve(profile, SolveOptions(objective="cost", max_step_s=1.001 * gpipe.solver.objective_s)).plan
    assert cheap.schedule == "gpipe"
    assert cheap.predicted.step_s <= 1.001 * gpipe.solver.objective_s


@pytest.mark.long
@pytest.mark.parametrize(("capacity", "fits"), [(11e6, False), (12e6, True), (13e6, True)])
def test_what_fits_only_where_it_is_shared(capacity, fits):
    """Under GPipe a worker that shares a stage has fewer micro-batches in flight than one that has it alone."""
    profile = make_profile(work=[4e-3] * 2, slowness=[1.0] * 4, parameters=1.5e6, capacity=capacity)
    options = SolveOptions(gap=0, schedule="gpipe", micro_batches=4, remat="never")
    check(profile, options, near=ROUNDING, schedules=("gpipe",), micro_batches=4)
    if fits:
        assert all(len(stage.workers) > 1 for stage in solve(profile, options).plan.stages)
        with pytest.raises(InfeasibleError):
            solve(profile, replace(options, max_replicas=1))


@pytest.mark.long
@pytest.mark.parametrize("seed", sweep([70, 71], quick=1))
def test_five_partitions_on_four_workers(seed):
    """All ways to share five partitions among four workers, in four micro-batches."""
    profile = random_instance(seed, partitions=5, workers=4, busy=seed % 2 == 0)
    options = SolveOptions(gap=0, schedule="gpipe", micro_batches=4)
    check(profile, options, near=ROUNDING, schedules=("gpipe",), micro_batches=4)


@pytest.mark.parametrize("seed", sweep([76], quick=[]))
def test_five_partitions_on_four_workers_at_every_depth(seed):
    """The same under 1F1B, with every warm-up depth, in two micro-batches."""
    profile = random_instance(seed, partitions=5, workers=4, busy=seed % 2 == 0)
    options = SolveOptions(gap=0, schedule="1f1b", micro_batches=2)
    check(profile, options, near=ROUNDING, schedules=("1f1b",), micro_batches=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", sweep([121, 122], quick=[121]))
def test_stages_that_share_a_parameter(seed):
    """Tied partitions in one shared stage, in two of them, and apart: exchanged, added up, never both."""
    profile = random_instance(seed, partitions=3, workers=3, busy=seed % 2 == 0, alike=seed % 3 == 0)
    first, last = profile.order[0], profile.order[-1]
    size = min(profile.partition[name].parameter_bytes for name in (first, last)) / 2
    check(
        replace(profile, ties=(Tie("w", (first, last), size),)),
        SolveOptions(schedule="one-stage", gap=0),
        near=ROUNDING,
    )


@pytest.mark.parametrize("seed", sweep([80, 81, 83, 85], quick=[80, 81, 85]))
def test_throughput_with_every_share(seed):
    """The steady state: no shares give a faster slowest worker than the bound says."""
    options = SolveOptions(gap=0, objective="throughput", schedule="gpipe", max_replicas=8)
    keeps = lambda plan: plan.micro_batches >= len(plan.workers)  # noqa: E731
    check(draw(seed), options, near=0.05, schedules=("gpipe",), remat=True, objective="throughput", keeps=keeps)


@pytest.mark.parametrize("seed", sweep(range(30), quick=8))
def test_shares_are_the_best_there_are(seed):
    """The busiest worker's time is the least threshold within which the workers carry all micro-batches."""
    rng = random.Random(seed)
    count, times = rng.randint(1, 9), [rng.choice([1.0, 1.5, 2.0, 7.0]) * rng.uniform(1, 1.2) for _ in range(3)]
    room = [rng.choice([2, 4, 99]) for _ in times]
    seconds = [[k * t if k <= most else np.inf for k in range(count + 1)] for t, most in zip(times, room, strict=True)]
    found, busiest = least_shares([np.array(each)[:, None] for each in seconds])
    thresholds = sorted({each for row in seconds for each in row})
    carried = [sum(max(k for k in range(count + 1) if row[k] <= t) for row in seconds) for t in thresholds]
    least = next((t for t, many in zip(thresholds, carried, strict=True) if many >= count and t < np.inf), np.inf)
    assert busiest[0] == pytest.approx(least)
    if least < np.inf:
        assert found[:, 0].sum() == count
        assert max(row[k] for row, k in zip(seconds, found[:, 0], strict=True)) == pytest.approx(least)


def test_every_set_of_workers_is_there_once():
    """Of two like workers and a third: a pair of like ones, one of them with the third, all three."""
    assert replica_sets([2, 1], 3) == [(0, 1), (0, 0), (0, 0, 1)]
    assert replica_sets([2, 1], 2) == [(0, 1), (0, 0)]


def test_data_parallelism_is_found_where_it_is_best():
    """On fast links the whole model on every worker, in shares by speed, has no bubble: nothing is better."""
    profile = wide(work=[1e-3, 2e-3, 1e-3], slowness=[1.0, 1.0, 2.0])
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=3)).plan
    assert len(plan.stages) == 1
    assert len(plan.workers) == 3
    assert plan.solver.status == "optimal"
    assert plan.predicted.step_s <= solve_baseline(profile, "data-parallel-by-speed").predicted.step_s * (1 + ROUNDING)


def test_stages_are_shared_by_some_of_the_workers():
    """A partition that only one worker may hold, and is a third of the work: the others share the rest."""
    profile = wide(work=[4e-3, 2e-3], slowness=[1.0, 1.0, 1.0])
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=3, pins={"p1": "worker:1"})).plan
    assert [stage.partitions for stage in plan.stages] == [("p0",), ("p1",)]
    assert shared(plan) == [{0: 8, 2: 8}, 1]


@pytest.mark.parametrize("seed", sweep(range(100, 106), quick=4))
def test_no_baseline_is_faster(seed):
    """With as many workers a stage as there are, neither form of data parallelism beats the plan."""
    profile = random_instance(seed, partitions=4, workers=3, busy=seed % 2 == 0, alike=seed % 3 == 0)
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=3)).plan
    contiguous = [each.step_s for each in plan.baselines if each.step_s is not None and "greedy" not in each.name]
    assert plan.predicted.step_s <= min(contiguous) * (1 + 0.01)


@pytest.mark.long
def test_any_number_of_workers_a_stage_unless_fewer_are_asked_for():
    """The default shares where that is best; with N no stage has more than N workers, with 1 none is shared."""
    profile = wide(work=[1e-3] * 4, slowness=[1.0] * 4)
    assert max(len(stage.workers) for stage in solve(profile).plan.stages) == 4
    assert not solve(profile, SolveOptions(schedule="one-stage", max_replicas=1)).plan.is_replicated
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=2)).plan
    assert max(len(stage.workers) for stage in plan.stages) == 2
    assert len(solve(profile, SolveOptions(schedule="one-stage", max_replicas=4, max_workers=3)).plan.workers) == 3
    assert "up to 2 workers a stage, updates undivided, under" in plan.solver.scope


def test_more_workers_than_partitions_are_used():
    """One partition, three workers: all of them share it."""
    assert shared(
        solve(wide(work=[3e-3], slowness=[1.0, 1.0, 2.0]), SolveOptions(schedule="one-stage", max_replicas=3)).plan
    ) == [{0: 7, 1: 6, 2: 3}]


@pytest.mark.long
def test_hints_hold_for_every_worker_of_a_stage():
    """Pins, forbidden workers, partitions kept apart or together, and the workers that may be used."""
    profile = wide(work=[1e-3] * 4, slowness=[1.0] * 4)
    options = SolveOptions(schedule="one-stage", max_replicas=4)
    assert shared(solve(profile, replace(options, pins={"p*": "worker:2"})).plan) == [2]
    off = solve(profile, replace(options, forbid=(("p1", "worker:0"),))).plan
    assert worker_name(0) not in off.holders["p1"]
    apart = solve(profile, replace(options, apart=(("p0", "p3"),))).plan
    assert not set(apart.holders["p0"]) & set(apart.holders["p3"])
    together = solve(profile, replace(options, together=(("p0", "p3"),))).plan
    assert together.holders["p0"] == together.holders["p3"]
    assert set(solve(profile, replace(options, only=("worker:1", "worker:3"))).plan.workers) <= {
        worker_name(1), worker_name(3)
    }  # fmt: skip


def test_workers_on_other_hosts_are_not_alike_where_all_reduces_are_not():
    """Two like workers add up fast between hosts and slowly on one: a shared stage takes two on different hosts."""
    profile = make_profile(work=[0.1] * 4, slowness=[1.0] * 4 + [100.0] * 2, bandwidth=1e8, latency=1e-3)
    hosts = [replace(each, host=f"host{n // 2}") for n, each in enumerate(profile.workers)]
    slow = Collective((worker_name(4), worker_name(5)), (LinkPoint(1e5, 0.3), LinkPoint(1e7, 10.0)))
    profile = replace(profile, workers=tuple(hosts), collectives=(slow,))
    options = SolveOptions(schedule="one-stage", max_workers=2, gap=0.0)
    free, apart, beside = (
        solve(profile, replace(options, only=only)).plan
        for only in ((), ("worker:0", "worker:2"), ("worker:0", "worker:1"))
    )
    assert free.solver.objective_s == pytest.approx(apart.solver.objective_s)
    assert free.solver.bound_s <= apart.solver.objective_s * (1 + ROUNDING)
    assert apart.solver.objective_s < 0.95 * beside.solver.objective_s


@pytest.mark.long
def test_workers_with_others_between_them_are_not_alike_where_rings_go_by_rank():
    """Of two like workers it matters which one joins: with one of them gloo's ring goes over the slow link."""
    profile = make_profile(
        work=[0.1] * 4, slowness=[1.8, 1.0, 1.8, 1.0, 1.0], edge_bytes=3e6, bandwidth=1e8, latency=1e-3, batch=7
    )
    ends = {worker_name(1), worker_name(3)}
    slow = [
        replace(link, points=tuple(replace(each, seconds=4 * each.seconds) for each in link.points))
        if {link.source, link.target} == ends else link
        for link in profile.links
    ]  # fmt: skip
    profile = replace(profile, links=tuple(slow))
    options = SolveOptions(schedule="one-stage", max_workers=4, gap=0.0)
    free = solve(profile, options).plan
    hinted = solve(profile, replace(options, only=tuple(f"worker:{n}" for n in range(1, 5)))).plan
    assert free.solver.objective_s == pytest.approx(hinted.solver.objective_s)
    assert free.solver.bound_s <= hinted.solver.objective_s * (1 + ROUNDING)


def test_memory_of_every_worker_holds():
    """A worker that cannot hold the whole model takes part in no stage that is the whole model."""
    profile = wide(work=[1e-3] * 4, slowness=[1.0] * 3, parameters=4e6, capacity=[1e12, 1e12, 2e7])
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=3)).plan
    assert not overfull(plan.predicted)
    assert all(worker_name(2) not in stage.workers for stage in plan.stages if len(stage.partitions) == 4)


def test_what_sharing_cannot_be_asked_for_with_is_refused():
    """Latency is of one micro-batch, and under interleaved a worker has several stages: both say so."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0] * 2)
    with pytest.raises(UsageError, match="one micro-batch goes through one worker"):
        solve(profile, SolveOptions(schedule="one-stage", max_replicas=2, objective="latency"))
    with pytest.raises(UsageError, match="a worker that shares a stage has no other"):
        solve(profile, SolveOptions(max_replicas=2, schedule="interleaved"))
    with pytest.raises(UsageError, match="no integer program states stages that several workers share"):
        check_exportable(profile, SolveOptions(max_replicas=2), Path("model.lp"))
    assert not solve(profile, SolveOptions(objective="latency")).plan.is_replicated
    assert not solve(profile, SolveOptions(schedule="interleaved")).plan.is_replicated
    plan = solve(profile, SolveOptions(schedule="one-stage", max_replicas=2)).plan
    with pytest.raises(UsageError, match="not yet carried by --complete"):
        completing(SolveOptions(), plan, profile)


def test_what_is_told_to_be_on_one_worker_stays_there():
    """A partition that cannot be shared has one worker; the others are shared, and the report says why."""
    profile = wide(work=[1e-3, 1e-3, 4e-3], slowness=[1.0] * 3)
    kept = replace(profile.partitions[0], one_worker="its forward changes ema")
    profile = replace(profile, partitions=(kept, *profile.partitions[1:]))
    plan = solve(profile).plan
    assert len(plan.holders["p0"]) == 1
    assert len(plan.holders["p2"]) > 1
    said = [line.text for line in sharing(plan, profile)]
    assert "not shared by several workers: 'p0': its forward changes ema" in said


@pytest.mark.parametrize("schedule", ["auto", "listed", "one-stage", "gpipe", "1f1b"])
def test_a_marked_partition_is_on_one_worker_in_baselines_too(schedule):
    """Data parallelism, best by far without the mark, is not possible with it, nor is it the answer."""
    profile = wide(work=[1e-5, 8e-3], slowness=[1.0] * 4)
    kept = replace(profile.partitions[0], one_worker="its forward changes ema")
    marked = replace(profile, partitions=(kept, *profile.partitions[1:]))
    plan = solve(marked, SolveOptions(schedule=schedule)).plan
    assert len(plan.holders["p0"]) == 1
    assert {each.name: each.step_s for each in plan.baselines}["data parallel"] is None
    with pytest.raises(InfeasibleError, match="breaks a hint or a mark"):
        solve_baseline(marked, "data-parallel")
    assert solve_baseline(profile, "data-parallel").is_replicated


def test_data_parallelism_has_no_more_workers_than_may_share_a_stage():
    """With at most N workers a stage, the baseline is written with N, and with 1 on one worker."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0] * 3)
    for name in ("data-parallel", "data-parallel-by-speed"):
        for most in (1, 2, 3):
            assert len(solve_baseline(profile, name, SolveOptions(max_replicas=most)).workers) == most


def test_both_scopes_are_told_where_less_is_proven_of_shared_stages():
    """The sentence of a plan with one worker a stage: what is proven of such plans, and of all."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0, 5.0], bandwidth=1e6)
    solver = solve(profile).plan.solver
    assert status(solver) == "optimal with one stage a worker, updates undivided"
    open_ = replace(solver, bound_s=0.9 * solver.objective_s, gap=0.1, status="feasible")
    assert status(open_) == "feasible: within 10.0 % of the best plan with one stage a worker, updates undivided"
    assert status(replace(open_, single_bound_s=solver.objective_s)) == (
        "optimal with one stage a worker and one worker a stage; within 10.0 % of any in which workers share a stage,"
        " updates undivided"
    )
    assert status(replace(open_, single_bound_s=solver.objective_s, any_order_s=open_.bound_s)) == (
        "optimal with one stage a worker and one worker a stage; within 10.0 % of any plan with any number of"
        " stages a worker, in any order"
    )


def test_the_status_says_where_plans_that_divide_updates_are_left_out():
    """Such a plan may be below the bound: not where there is nothing to divide, nor where workers share no stage."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0, 5.0])
    stateless = replace(profile, partitions=tuple(replace(each, optimizer_bytes=0) for each in profile.partitions))
    points = tuple(replace(each, update_s=0.0) for each in profile.measurements)
    idle, at_once = replace(profile, measurements=points), replace(stateless, measurements=points)
    for each, most, said in (
        (profile, 2, True), (idle, 2, True), (stateless, 2, True), (at_once, 2, False), (profile, 1, False)
    ):  # fmt: skip
        solver = solve(each, SolveOptions(schedule="gpipe", max_replicas=most)).plan.solver
        assert status(solver).endswith(", updates undivided") == ("updates undivided" in solver.scope) == said


def test_the_sentence_of_a_proof_says_that_hints_were_kept():
    """And only where there were any: without them other plans are better."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0, 5.0])
    names = tuple(profile.order)
    for asked in ({"together": (names,)}, {"max_workers": 1}, {"pins": {names[0]: "worker:1"}}, {"remat": "always"}):
        scope = solve(profile, SolveOptions(schedule="one-stage", **asked)).plan.solver.scope
        assert scope.startswith("plans that keep the hints, with one stage a worker"), asked
    assert solve(profile, SolveOptions(schedule="one-stage")).plan.solver.scope.startswith("plans with one stage")


@pytest.mark.slow
@pytest.mark.parametrize("seed", sweep(range(140, 146), quick=3))
def test_that_workers_may_share_makes_no_plan_slower(seed):
    """At the usual gap, too, where lighter plans may be preferred."""
    profile = random_instance(seed, partitions=6, workers=3, busy=seed % 2 == 0, tight=seed % 3 == 0)
    both = [
        solve(profile, SolveOptions(schedule="one-stage", max_replicas=most)).plan.predicted.step_s
        for most in (1, None)
    ]
    assert both[1] <= both[0] * (1 + ROUNDING)


def test_money_is_saved_by_sharing():
    """Money per sample: two workers that share everything cost what one does, and take half the step."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0] * 2)
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    alone = solve(profile, SolveOptions(objective="cost")).plan
    step = alone.predicted.step_s
    if len(alone.workers) == 1:
        step *= 0.55
    plan = solve(profile, SolveOptions(objective="cost", max_replicas=2, max_step_s=step)).plan
    assert plan.predicted.step_s <= step


def test_the_same_input_gives_the_same_plan():
    """Sharing is searched by counts and a seed, not by the clock."""
    profile = draw(17)
    first, second = (solve(profile, SolveOptions(schedule="one-stage", max_replicas=4)).plan for _ in range(2))
    assert first.stages == second.stages
    assert first.candidates == second.candidates


def by_hand(profile, shares, count):
    """Seconds of a step in which workers of these shares run the whole model and add up all gradients."""
    cost, size = CostModel(profile), profile.workload.batch_size // count
    rows = {
        worker: [cost.partition(name, worker, size) for name in profile.order]
        for worker in (each.name for each in profile.workers)
    }
    held = [name for name, share in zip(rows, shares, strict=True) if share]
    compute = max(
        share * sum(each.forward_s + each.backward_s for each in row)
        for row, share in zip(rows.values(), shares, strict=True)
    )
    reduce_s = cost.reduce_s(tuple(held), sum(each.gradient_bytes for each in profile.partitions))
    return compute + reduce_s + max(sum(each.update_s for each in rows[name]) for name in held)


def test_data_parallel_takes_equal_shares():
    """Of the numbers of micro-batches that go by three, the best; what it takes is compute, reduce and update."""
    profile = make_profile(work=[1e-3, 2e-3], slowness=[1.0, 1.0, 3.0], batch=12)
    plan = solve_baseline(profile, "data-parallel")
    count = plan.micro_batches
    assert shared(plan) == [dict.fromkeys(range(3), count // 3)]
    expected = min(by_hand(profile, [m // 3] * 3, m) for m in divisors(12) if m % 3 == 0)
    assert plan.predicted.step_s == pytest.approx(expected)


def test_data_parallel_by_speed_fills_the_threshold():
    """The fastest takes most, a worker that is too slow for one micro-batch takes none."""
    profile = make_profile(work=[1e-3, 2e-3], slowness=[1.0, 2.0, 40.0], batch=12)
    plan = solve_baseline(profile, "data-parallel-by-speed", SolveOptions(micro_batches=12))
    assert shared(plan) == [{0: 8, 1: 4}]
    expected = min(by_hand(profile, shares, 12) for shares in itertools.product(range(1, 13), repeat=2)
                   for shares in [(*shares, 0)] if sum(shares) == 12)  # fmt: skip
    assert plan.predicted.step_s == pytest.approx(expected)


def test_data_parallel_needs_the_whole_model_on_every_worker():
    """State of 16 MB and one micro-batch in flight on each: 15 MB do not hold it, 18 MB do, whatever M is."""
    small = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2, parameters=2e6, activation=1e5, capacity=1.5e7)
    with pytest.raises(InfeasibleError, match="data parallel does not fit"):
        solve_baseline(small, "data-parallel")
    enough = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2, parameters=2e6, activation=1e5, capacity=2.5e7)
    assert solve_baseline(enough, "data-parallel").predicted.workers[0].peak_bytes <= 2.5e7


def test_data_parallel_heeds_hints():
    """A partition pinned to one worker leaves that one alone; two kept apart leave nobody."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2)
    assert solve_baseline(profile, "data-parallel", SolveOptions(pins={"p0": "worker:1"})).workers == (worker_name(1),)
    with pytest.raises(InfeasibleError):
        solve_baseline(profile, "data-parallel", SolveOptions(apart=(("p0", "p1"),)))


@pytest.mark.parametrize("objective", ["step", "throughput"])
def test_depths_that_wait_for_ever_are_no_plan(objective):
    """Where workers share the stages, timing alone does not find it: the program could not be built all the same."""
    profile = wide(work=[1e-3] * 2, slowness=[1.0] * 4)
    search = Search(*resolve(profile, SolveOptions(objective=objective, max_replicas=2)))
    shared = [each for each in search.candidates if isinstance(each, SharedCandidate)]
    candidate = next(each for each in shared if each.micro_batches == 8)
    names = [each.name for each in profile.workers]

    def plan(first: int, then: int) -> Plan:
        stages = [
            Stage(None, ("p0",), in_flight=first, replicas=(Replica(names[0], 4), Replica(names[1], 4))),
            Stage(None, ("p1",), in_flight=then, replicas=(Replica(names[2], 4), Replica(names[3], 4))),
        ]
        return Plan(
            workload=replace(profile.workload), schedule="1f1b", micro_batches=8, micro_batch_size=2,
            stages=tuple(stages), objective=objective,
        )  # fmt: skip

    assert math.isfinite(candidate.plans.worth(plan(4, 3))[0])
    assert candidate.plans.worth(plan(3, 4)) == (math.inf, math.inf)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", range(4))
def test_the_schedule_is_left_open_where_one_has_all_values(seed, objective):
    """Under these objectives no plan of GPipe's is better than all of 1F1B's, which alone are searched."""
    profile = random_instance(seed, partitions=3, workers=3, batch=4, tight=seed % 2 == 0)
    most = 2 if objective == "throughput" else None
    options = SolveOptions(objective=objective, max_replicas=most, gap=0.0)
    open_ = solve(profile, options).plan
    assert {each.schedule for each in open_.candidates} == {"1f1b"}
    for count in (None, 2, 4):
        try:
            gpipe = solve(profile, replace(options, schedule="gpipe", micro_batches=count)).plan
        except InfeasibleError:
            continue
        assert open_.solver.objective_s <= gpipe.solver.objective_s * (1 + ROUNDING)


def test_no_plan_that_divides_updates_is_below_the_bound_of_all():
    """A parameter that the partitions of a stage share is updated once, by whoever has the first of them."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1, 1], bandwidth=1e10, latency=1e-6, batch=4)
    update_s = {"p0": 0.02, "p1": 0.005, "p2": 0.02}
    profile = replace(
        profile,
        measurements=tuple(replace(each, update_s=update_s[each.partition]) for each in profile.measurements),
        ties=(Tie("shared", ("p0", "p2"), 1e6),),
    )
    cost = CostModel(profile)
    parts = [("p0",), ("p1", "p2")]
    workers = tuple(Replica(worker_name(n), 1, updates=part) for n, part in enumerate(parts))
    stage = Stage(None, tuple(profile.order), replicas=workers)
    plan = Plan(workload=profile.workload, micro_batches=2, micro_batch_size=2, stages=(stage,))
    assert least_of_all_s(Problem(profile, SolveOptions(), cost), [2]) <= step_s(plan, cost)


def test_a_longer_stage_is_shared_where_more_bytes_take_less():
    """As measured sweeps may say, whose times fall with their sizes here and there."""
    profile = make_profile(work=[1e-4, 1e-4], slowness=[1, 1], parameters=2e6, batch=4)
    points = tuple(LinkPoint(*each) for each in ((1e3, 1e-4), (1e6, 1e-2), (2e6, 4e-3), (1e7, 2e-2)))
    profile = replace(profile, links=tuple(replace(each, points=points) for each in profile.links))
    table = Problem(profile, SolveOptions(), CostModel(profile)).prices(2).intervals
    every, below = (ReplicaOptions(table, deep=True, below=lambda s=s: s) for s in (0.5, 0.015))
    whole = [each for each in every.all if each.shares and each.busiest_s + each.update_s < 0.015]
    assert [(each.first, each.last) for each in whole] == [(0, 1)]
    assert [each for each in below.all if each.shares] == whole
