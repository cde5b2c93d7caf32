"""Placements of any shape: priced as the simulator does, searched whole where that is promised, bounded honestly."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from brute_force import random_instance, with_shared_values
from builders import make_profile, single
from every_placement import best_of_all
from sweeps import sweep

from assigner.formats.graph import topological_order
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict, prediction_of, step_s, worker_memory
from assigner.solver import SolveOptions, solve
from assigner.solver.free.annealing import Annealing
from assigner.solver.free.bounds import Bounds
from assigner.solver.free.candidate import FreeCandidate
from assigner.solver.free.exhaustive import Exhaustive, StageOrders
from assigner.solver.free.pricing import Arrangement, StepPricing, again_s, held_stages, joined
from assigner.solver.free.row_timing import row_step_s
from assigner.solver.free.starts import orders, starts
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import SearchState
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.prices import bits
from assigner.solver.problem.problem import Problem
from assigner.solver.problem.set_memory import SetMemory
from assigner.solver.search.search import candidates_of

KINDS = ("gpipe", "interleaved")


def state_of(profile, **options):
    resolved = resolve(profile, single(**{"gap": 0.0, **options}))
    return SearchState(Problem(*resolved, CostModel(resolved[0])), lambda: None)


def searched(profile, schedule, **options):
    """The state after one kind of candidate went through its phases."""
    state = state_of(profile, schedule=schedule, **options)
    state.candidates = [FreeCandidate(state, schedule, m) for m in state.options.counts(state.problem.cost)]
    for phase in ("price", "start", "tighten", "prove"):
        for each in state.candidates:
            if not each.decided:
                getattr(each, phase)()
    return state


def memory_of(profile, micro_batches=2, **options):
    return SetMemory(state_of(profile, micro_batches=micro_batches, **options).problem, micro_batches)


def priced(memory, stages):
    return StepPricing(memory, one_stage=False).price(stages)


def drawn(seed, partitions=4, workers=3):
    """An instance of many kinds."""
    rng = random.Random(seed)
    return random_instance(
        seed, partitions=partitions, workers=workers, busy=rng.random() < 0.5, graph=rng.random() < 0.6,
        tight=rng.random() < 0.5, missing=rng.choice([0.0, 0.2]), pins=rng.random() < 0.3, alike=rng.random() < 0.3,
        late_updates=rng.random() < 0.2, batch=rng.choice([2, 4]),
    )  # fmt: skip


def random_stages(problem, rng):
    names = list(problem.order)
    rng.shuffle(names)
    edges = [(edge.source, edge.target) for edge in problem.profile.edges]
    order = [problem.position[name] for name in topological_order(names, edges)]
    cuts = [0, *(i for i in range(1, len(order)) if rng.random() < 0.6), len(order)]
    workers = len(problem.profile.workers)
    return tuple((rng.randrange(workers), sum(1 << i for i in order[a:b])) for a, b in itertools.pairwise(cuts))


@pytest.mark.parametrize("seed", range(40))
def test_a_row_takes_what_the_simulator_says(seed):
    """Any stages in topological order: to the last bit the simulator's step time, and they fit its memory."""
    rng = random.Random(seed)
    profile = random_instance(
        seed, partitions=6, workers=3, busy=seed % 2 == 0, graph=seed % 3 > 0, tight=seed % 5 == 0
    )
    profile = with_shared_values(profile, seed) if seed % 3 == 1 else profile
    memory = memory_of(profile, rng.choice([1, 2, 4]))
    found = priced(memory, random_stages(memory.table.problem, rng))
    if found is not None:
        cost = memory.table.problem.cost
        plan = found.plan("interleaved")
        assert step_s(plan, cost) == found.value_s
        for worker in plan.workers:
            assert worker_memory(cost, plan, worker).total <= profile.worker[worker].capacity_bytes * (1 + 1e-12)


def test_a_row_waits_for_no_reader_without_a_gradient():
    """A worker's stage that reads a value and sends no gradient does not delay that of its other stage."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0] * 3, edges=[(0, 1), (0, 3), (2, 3)], bandwidth=1e7)
    profile = replace(profile, edges=tuple(replace(e, gradient=e.target != "p1") for e in profile.edges))
    memory = memory_of(profile, 4)
    found = priced(memory, ((0, 0b0001), (1, 0b0010), (2, 0b0100), (1, 0b1000)))
    assert found.value_s == step_s(found.plan("interleaved"), memory.table.problem.cost)


def test_a_cut_by_which_a_gradient_leaves_earlier_is_looked_at():
    """Of a value that a worker's first stage reads without a gradient, and its second one with: by the second alone."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2, edges=[(0, 1), (1, 2), (0, 2)], batch=1)
    profile = replace(profile, edges=tuple(replace(e, gradient=e.target != "p1") for e in profile.edges))
    pins = {"p0": "worker:0", "p1": "worker:1", "p2": "worker:1"}
    plan = solve(profile, SolveOptions(schedule="interleaved", micro_batches=1, pins=pins)).plan
    assert [stage.partitions for stage in plan.stages] == [("p0",), ("p1",), ("p2",)]
    assert plan.solver.status == "optimal"


@pytest.mark.parametrize("seed", range(12))
def test_rematerialisation_of_several_stages_is_joint(seed):
    """Of all subsets that fit a worker's memory none is faster than the best choice, nor cheaper than the cheapest."""
    profile = random_instance(seed, partitions=5, workers=2, tight=True, graph=True)
    memory = memory_of(profile, 4)
    stages, cost = random_stages(memory.table.problem, random.Random(seed)), memory.table.problem.cost
    plan = Arrangement(memory.table, stages, (0,) * len(stages), 0.0).plan("interleaved")
    steps = []
    for number in range(1 << 5):
        names = {name for k, name in enumerate(profile.order) if number >> k & 1}
        again = tuple(
            replace(s, rematerialise=tuple(name for name in s.partitions if name in names)) for s in plan.stages
        )
        other = replace(plan, stages=again)
        if not overfull(prediction_of(other, cost)):
            steps.append((step_s(other, cost), sum(len(each.rematerialise) for each in again)))
    held = held_stages(stages)
    choices = [memory.choices(worker, tuple(stages[n][1] for n in numbers)) for worker, numbers in held.items()]
    found = []
    for chosen in itertools.product(*choices):
        again = joined(stages, chosen)
        rows = [(worker, tuple(bits(mask))) for worker, mask in stages]
        found.append(row_step_s(memory.table, rows, again_s(memory, stages, again)))
    assert min(found, default=math.inf) == pytest.approx(min(steps, default=(math.inf,))[0], rel=1e-12)
    cheapest = priced(memory, stages)
    assert (cheapest is None) == (not steps)
    assert cheapest is None or cheapest.value_s >= min(found)


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("seed", sweep(range(21), quick=[0, 3, 8, 11, 15, 18, 20]))
def test_the_search_of_a_small_instance_finds_the_best_of_all(seed, schedule):
    """The plan's step time equals the best of every placement, order and rematerialisation; and that is proven."""
    profile = drawn(seed)
    state = searched(profile, schedule)
    assert all(each.decided for each in state.candidates)
    bound = min(each.bound for each in state.candidates)
    best = best_of_all(profile, schedule=schedule, below=state.best_value * (1 + 1e-6))
    if best is None:
        assert state.best is None
        assert bound == math.inf
        return
    assert state.best_value == pytest.approx(best[0], rel=1e-12)
    assert bound == pytest.approx(best[0], rel=1e-6)
    assert predict(state.best.plan, profile).step_s == state.best_value
    assert not overfull(predict(state.best.plan, profile))
    assert state.best.plan.schedule == schedule


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("seed", sweep(range(20), quick=[0, 1, 3, 6, 7, 8, 15, 16, 18]))
def test_bounds_hold(seed, schedule):
    """Neither the first bound, nor the load model's relaxation, nor its ILP is above the optimum."""
    profile = drawn(seed, partitions=5)
    state = searched(profile, schedule, micro_batches=2)
    optimum = state.best_value
    fresh = state_of(profile, micro_batches=2)
    each = FreeCandidate(fresh, schedule, 2)
    each.price()
    assert each.bound <= optimum * (1 + 1e-9)
    if each.decided:
        return
    for kind in ("relax", "search"):
        model = each._model()
        limits = {} if kind == "relax" else {"gap": 0.0, "cutoff": math.inf}
        outcome = getattr(fresh.backend, kind)(model.problem, time_limit=20, **limits)
        assert outcome.finished
        assert outcome.bound * model.unit <= optimum * (1 + 1e-6)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_worker_without_any_room_holds_nothing(schedule):
    """A reserve may take all of a worker's memory: the others are used, and the load model is still a bound."""
    profile = make_profile(work=[1e-3] * 4, slowness=[2.0, 1.0, 2.0], edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    empty = replace(profile.workers[1], reserve_bytes=profile.workers[1].memory_bytes)
    profile = replace(profile, workers=(profile.workers[0], empty, profile.workers[2]))
    state = searched(profile, schedule, micro_batches=2)
    assert set(state.best.plan.workers) == {"worker:0/cpu", "worker:2/cpu"}
    each = FreeCandidate(state_of(profile, micro_batches=2), schedule, 2)
    model = each._model()
    outcome = state.backend.relax(model.problem, time_limit=20)
    assert 0 < outcome.bound * model.unit <= state.best_value * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_part_of_a_placement_hold(seed):
    """What the search believes of a prefix of a placement is never above the time of the whole."""
    profile = random_instance(seed, partitions=6, workers=3, busy=seed % 2 == 0, graph=True, late_updates=seed % 3 == 0)
    memory = memory_of(profile, 4)
    rng = random.Random(seed)
    for _ in range(10):
        stages = random_stages(memory.table.problem, rng)
        found = priced(memory, stages)
        where = {i: worker for worker, mask in stages for i in bits(mask)}
        for placed in range(7):
            known = [where[i] if i < placed else -1 for i in range(6)]
            masks = [sum(1 << i for i in range(placed) if where[i] == w) for w in range(3)]
            bound, _ = Bounds(memory).least(known, masks)
            assert bound <= found.value_s * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_convex_stages_hold(seed):
    """With one stage a worker, what the sharper bound says of a prefix is never above the time of the whole."""
    profile = random_instance(seed, partitions=6, workers=3, busy=seed % 2 == 0, graph=True, tight=seed % 3 == 0)
    memory = memory_of(profile, 4)
    rng, table, bounds, checked = random.Random(seed), memory.table, Bounds(memory), 0
    for _ in range(60):
        where = [rng.randrange(3) for _ in range(6)]
        whole = table.in_order([sum(1 << i for i in range(6) if where[i] == w) for w in range(3)])
        found = None if whole is None else priced(memory, whole)
        if found is None:
            continue
        checked += 1
        for placed in range(7):
            known = [w if i < placed else -1 for i, w in enumerate(where)]
            stages = table.in_order([sum(1 << i for i in range(placed) if where[i] == w) for w in range(3)])
            assert bounds.convex(known, stages) <= found.value_s * (1 + 1e-12)
    assert checked


def test_a_search_that_runs_out_of_nodes_claims_no_more_than_it_knows():
    """Its floor is below the optimum, and it is the same every time."""
    profile = random_instance(3, partitions=6, workers=3, graph=True)
    best = searched(profile, "interleaved", micro_batches=2).best_value
    floors = []
    for nodes in (30, 30, 200):
        memory = memory_of(profile)
        search = Exhaustive(
            StepPricing(memory, one_stage=False),
            limit=math.inf,
            take=lambda found: found.value_s,
            nodes=nodes,
            stop=lambda: False,
        )
        assert not search.run()
        floors.append(search.floor)
    assert floors[0] == floors[1]
    assert max(floors) <= best


def test_no_nodes_left_leaves_the_setting_undecided(monkeypatch):
    """The bound stays honest, the plans at hand are kept."""
    profile = random_instance(5, partitions=6, workers=3)
    best = searched(profile, "interleaved", micro_batches=2).best_value
    monkeypatch.setattr(tuning, "NODES", 20)
    state = searched(profile, "interleaved", micro_batches=2)
    assert not state.candidates[0].decided
    assert state.candidates[0].bound <= best <= state.best_value


def test_hints_are_heeded():
    """Largest number of workers, partitions apart and together, an order of workers."""
    profile = random_instance(11, partitions=5, workers=3, graph=True)
    free_best = searched(profile, "interleaved").best_value
    one = searched(profile, "interleaved", max_workers=1)
    assert len(one.best.plan.workers) == 1
    apart = searched(profile, "interleaved", apart=(("p0", "p1", "p2"),))
    assert len({apart.best.plan.placement[name] for name in ("p0", "p1", "p2")}) == 3
    together = searched(profile, "interleaved", together=(("p0", "p4"),))
    assert together.best.plan.placement["p0"] == together.best.plan.placement["p4"]
    ordered = searched(profile, "interleaved", order=("worker:2", "worker:0"))
    ranks = [{"worker:2/cpu": 0, "worker:0/cpu": 1}[stage.worker] for stage in ordered.best.plan.stages]
    assert ranks == sorted(ranks)
    assert predict(ordered.best.plan, profile).step_s == ordered.best_value
    assert free_best <= min(each.best_value for each in (one, apart, together, ordered))


def test_looping_a_chain_over_two_workers_beats_one_stage_each():
    """With few micro-batches a worker that holds the first and the third quarter waits less."""
    profile = make_profile(work=[4e-3] * 8, slowness=[1.0, 1.0], batch=2, latency=1e-6, bandwidth=1e12)
    one = searched(profile, "gpipe").best_value
    loops = searched(profile, "interleaved")
    assert loops.best_value < 0.9 * one
    assert len(loops.best.plan.stages) > 2


def towers(each=5, workers=4):
    """Two branches of equal work and their join."""
    n = 2 * each + 1
    edges = [(i, i + 1) for i in (*range(each - 1), *range(each, 2 * each - 1))]
    edges += [(each - 1, n - 1), (2 * each - 1, n - 1)]
    return make_profile(work=[2e-3] * (n - 1) + [1e-4], slowness=[1.0] * workers, edges=edges, batch=4)


def test_branches_on_different_workers_run_at_the_same_time():
    """The order of the file alternates between two branches; the best stages are not intervals of it."""
    profile = towers(each=2, workers=3)
    names = ["p0", "p2", "p1", "p3", "p4"]
    profile = replace(profile, partitions=tuple(profile.partition[name] for name in names))
    state = searched(profile, "gpipe", micro_batches=1)
    assert [sorted(stage.partitions) for stage in state.best.plan.stages][:2] == [["p0", "p1"], ["p2", "p3"]]
    assert state.candidates[0].decided


def test_which_settings_there_are():
    """One stage a worker only where the pipeline solver's proof does not hold; interleaved by request or if small."""
    chain, graph = random_instance(1, partitions=5, workers=3), towers(each=6)
    large = make_profile(work=[1e-3] * 12, slowness=[1.0] * 4)
    counts = (1, 2)

    def found(profile, schedule):
        every = candidates_of(state_of(profile, schedule=schedule), counts)
        return [(each.schedule, each.micro_batches) for each in every if isinstance(each, FreeCandidate)]

    both = [("interleaved", 1), ("interleaved", 2)]
    assert found(chain, "gpipe") == []
    assert found(graph, "gpipe") == [("gpipe", 1), ("gpipe", 2)]
    assert found(chain, "1f1b") == []
    assert found(chain, "interleaved") == found(large, "interleaved") == both
    assert found(chain, "auto") == found(large, "auto") == []


def test_starts_follow_several_orders():
    """Branch by branch as well as the profile's own order; each is topological and whole."""
    table = memory_of(towers(each=3)).table
    found = orders(table)
    assert found[0] == tuple(range(7))
    assert (3, 4, 5, 0, 1, 2, 6) in found
    for order in found:
        assert sorted(order) == list(range(7))
        assert all(order.index(maker) < order.index(reader) for maker, _, reader, _ in table.edges)


@pytest.mark.parametrize("one_stage", [True, False])
def test_local_search_only_gets_better_and_repeats_itself(one_stage, monkeypatch):
    """From a plain loop to a better plan that the simulator prices alike; the same seed ends at the same one."""
    monkeypatch.setattr("assigner.solver.limits.tuning.ANNEALING_TRIES", 400)
    state = state_of(towers(each=4, workers=3), micro_batches=4)
    ends = []
    for _ in range(2):
        memory = SetMemory(state.problem, 4)
        wander = Annealing(StepPricing(memory, one_stage=one_stage), seed=0, stop=lambda: False)
        first = next(found for stages in starts(state, memory.table, loops=False) if (found := wander.start(stages)))
        ends.append(wander.run(first))
        assert ends[-1].value_s <= first.value_s
    assert ends[0].stages == ends[1].stages
    plan = ends[0].plan("gpipe" if one_stage else "interleaved")
    assert step_s(plan, state.problem.cost) == ends[0].value_s
    if one_stage:
        assert len(plan.stages) == len(plan.workers)


def test_stages_that_wait_for_each_other_have_no_order():
    """0 -> 1 -> 2 with the ends on one worker is a circle of stages; a fork is not."""
    chain, fork = (
        memory_of(make_profile(work=[1e-3] * 3, slowness=[1.0] * 2, edges=edges)).table
        for edges in ([(0, 1), (1, 2)], [(0, 1), (0, 2)])
    )
    assert chain.in_order((0b101, 0b010)) is None
    assert fork.in_order((0b110, 0b001)) == ((1, 0b001), (0, 0b110))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", KINDS)
def test_larger_instances_have_good_plans_and_honest_bounds(schedule, monkeypatch):
    """Beyond exhaustive search: the plan is no worse than the pipelines it started from, the bound is below it."""
    monkeypatch.setattr("assigner.solver.limits.tuning.ANNEALING_TRIES", 300)
    monkeypatch.setattr(tuning, "NODES", 300)
    state = searched(towers(each=7), schedule, micro_batches=4, gap=0.01)
    (each,) = state.candidates
    assert not each.certain
    assert 0 < each.bound <= state.best_value
    assert predict(state.best.plan, state.problem.profile).step_s == state.best_value
    memory = SetMemory(state.problem, 4)
    firsts = [priced(memory, stages) for stages in starts(state_of(towers(each=7)), memory.table, loops=False)]
    assert state.best_value <= min(first.value_s for first in firsts if first is not None)
    assert searched(towers(each=7), schedule, micro_batches=4, gap=0.01).best.plan == state.best.plan


def test_a_search_tells_of_its_progress(monkeypatch):
    """The watch is called while a candidate searches, and may interrupt it."""
    monkeypatch.setattr(tuning, "TELL_S", 0.0)
    calls = []

    def watch():
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt

    resolved = resolve(random_instance(3, partitions=7, workers=4, graph=True), single(gap=0.0, micro_batches=2))
    state = SearchState(Problem(*resolved, CostModel(resolved[0])), watch)
    state.candidates = [FreeCandidate(state, "interleaved", 2)]
    state.candidates[0].price()
    with pytest.raises(KeyboardInterrupt):
        state.candidates[0].prove()
    assert not state.candidates[0].decided


def next_stages(before, masks, done=0):
    rows = object.__new__(StageOrders)
    rows._table, rows._masks = SimpleNamespace(before=before), masks
    return rows._next(done)


@pytest.mark.parametrize("seed", range(40))
def test_every_stage_that_can_come_next(seed):
    """Those whose partitions lack nothing that they read, of each worker in falling order, and no others."""
    rng = random.Random(seed)
    before = [sum(1 << j for j in range(i) if rng.random() < 0.3) for i in range(8)]
    masks = [0, 0]
    for i in range(8):
        masks[rng.randrange(2)] |= 1 << i
    done = (1 << rng.randrange(4)) - 1
    every = [
        (worker, stage) for worker, mask in enumerate(masks) for stage in range(255, 0, -1)
        if not stage & ~(mask & ~done) and all(not before[i] & ~(done | stage) for i in bits(stage))
    ]  # fmt: skip
    assert list(next_stages(before, masks, done)) == every


def test_next_stages_of_a_long_chain():
    """Of a chain on one worker those are its beginnings, and nobody looks at all subsets for them."""
    chain = [1 << i >> 1 for i in range(200)]
    assert [stage.bit_length() for _, stage in next_stages(chain, [(1 << 200) - 1])] == list(range(200, 0, -1))
