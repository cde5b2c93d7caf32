"""Orders that are solved: within memory, priced by the simulator, never worse than a rule, and proven where tiny."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from brute_force import random_instance, with_shared_values
from builders import CAPACITY, make_plan, make_profile
from sweeps import sweep

from assigner.errors import FormatError, InfeasibleError, UsageError
from assigner.formats.document import decode, encode
from assigner.formats.plan import Plan
from assigner.formats.stage import Replica, Stage
from assigner.report.solution import proof_lines
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import ActionKind, order_of
from assigner.schedule.simulate import overfull, predict, step_s
from assigner.solver import SolveOptions, solve
from assigner.solver.limits import tuning
from assigner.solver.orders.bounds import least_of_all_s, least_step_s
from assigner.solver.orders.exchanges import EveryOrder, Exchanges
from assigner.solver.orders.listing import RULES, list_schedule, made_to_fit, rules_for, zero_bubble
from assigner.solver.orders.search import best_orders, named_orders
from assigner.solver.orders.tasks import PlacedTasks
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.problem import Problem

BUDGET = 20_000


def drawn_plan(seed, *, partitions=6, workers=3, micro_batches=4, stages=None):
    """A placement with any number of stages a worker, over a chain or a graph, and its profile."""
    rng = random.Random(seed)
    profile = random_instance(
        seed, partitions=partitions, workers=workers, busy=seed % 2 == 0, graph=seed % 3 == 0, batch=micro_batches
    )
    count = stages or rng.randint(1, partitions)
    cuts = [0, *sorted(rng.sample(range(1, partitions), count - 1)), partitions]
    profile = with_shared_values(profile, seed) if seed % 6 == 0 else profile
    names = [profile.order[a:b] for a, b in itertools.pairwise(cuts)]
    placed = [(rng.randrange(workers), each) for each in names]
    plan = make_plan(profile, placed, micro_batches=micro_batches)
    again = [tuple(name for name in stage.partitions if rng.random() < 0.2) for stage in plan.stages]
    stages_ = tuple(replace(each, rematerialise=names) for each, names in zip(plan.stages, again, strict=True))
    return replace(plan, stages=stages_), profile


def tightened(profile, plan, share):
    """The profile with memory for `share` of what the plan keeps for its backwards when all are in flight."""
    tasks = PlacedTasks(plan, CostModel(profile))
    capacity = {}
    for n, (worker, room) in enumerate(zip(plan.workers, tasks.room, strict=True)):
        one = sum(kept for (_, where), kept in tasks.kept.items() if where == n)
        fixed = profile.worker[worker].capacity_bytes - room
        capacity[worker] = fixed + max(one, share * plan.micro_batches * one) + 1  # for rounding
    workers = tuple(replace(each, memory_bytes=capacity.get(each.name, each.memory_bytes)) for each in profile.workers)
    return replace(profile, workers=workers)


@pytest.mark.parametrize("seed", range(24))
def test_a_listed_order_is_a_plan_that_fits_and_takes_what_was_said(seed):
    """By every rule, with little memory too: the written plan is sound, fits, and the simulator says the same step."""
    plan, profile = drawn_plan(seed)
    profile = tightened(profile, plan, (1.0, 0.6, 0.3)[seed % 3])
    tasks = PlacedTasks(plan, CostModel(profile))
    for rule in rules_for(tasks):
        orders = list_schedule(tasks, rule)
        assert orders is not None, rule
        written = tasks.listed(orders)
        prediction = predict(written, profile)
        assert prediction.step_s == tasks.step_s(orders)
        assert not overfull(prediction)
        assert decode(Plan, encode(written)) == written


def test_a_backward_waits_for_none_that_sends_no_gradient():
    """Two stages of a worker read one value: only the one that sends its gradient back has a place before another."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2, edges=[(0, 1), (0, 2)], batch=2)
    profile = replace(profile, edges=tuple(replace(e, gradient=e.target != "p1") for e in profile.edges))
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (1, ["p2"])], micro_batches=2)
    tasks = PlacedTasks(plan, CostModel(profile))
    backward = {stage: tasks.task(ActionKind.BACKWARD, stage, 0) for stage in (1, 2)}
    assert backward[1] not in tasks.behind[backward[2]]
    assert tasks.task(ActionKind.FORWARD, 2, 0) in tasks.behind[tasks.task(ActionKind.FORWARD, 1, 0)]


@pytest.mark.parametrize("seed", range(8))
def test_replicas_take_the_micro_batches_that_their_plan_gives_them(seed):
    """A stage on two workers beside one on a third: listed orders run, fit, and take what was said."""
    rng = random.Random(seed)
    profile = random_instance(seed, partitions=4, workers=3, busy=seed % 2 == 0, batch=6)
    names, workers = profile.order, [worker.name for worker in profile.workers]
    share = rng.randint(1, 5)
    stages = (
        Stage(None, names[:2], replicas=(Replica(workers[0], share), Replica(workers[1], 6 - share))),
        Stage(workers[2], names[2:3]),
        Stage(workers[0], names[3:]),
    )
    plan = Plan(workload=profile.workload, micro_batches=6, micro_batch_size=1, stages=stages)
    cost = CostModel(profile)
    tasks = PlacedTasks(plan, cost)
    found = best_orders(tasks, most=BUDGET)
    assert found is not None
    written = tasks.listed(found.orders)
    assert step_s(written, cost) == found.step_s
    assert found.bound_s <= found.step_s * (1 + 1e-9)


def in_parts(profile, *, share=0.6, kept=0.5):
    """The profile with the parts of backwards measured: an input part of that share, and what waits behind it."""
    return replace(
        profile,
        measurements=tuple(
            replace(
                each, backward_input_s=share * each.backward_s, backward_weight_s=(1 - share) * each.backward_s,
                waiting_bytes=kept * each.activation_bytes,
            )
            for each in profile.measurements
        ),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_backwards_in_two_parts_fit_and_take_what_was_said(seed):
    """By every rule, with little memory too: a weight part behind each input part, and the simulator agrees."""
    plan, profile = drawn_plan(seed)
    profile = in_parts(tightened(profile, plan, (1.0, 0.7)[seed % 2]))
    tasks = PlacedTasks(plan, CostModel(profile), split=True)
    for rule in rules_for(tasks):
        orders = list_schedule(tasks, rule)
        if orders is None:
            assert not tasks.may_run  # what waits needs room, too
            continue
        written = tasks.listed(orders)
        prediction = predict(written, profile)
        assert prediction.step_s == tasks.step_s(orders)
        assert tasks.fits(orders)
        assert not overfull(prediction)
        assert "W" in "".join(written.orders.values())


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 4), (3, 2), (4, 8), (4, 11)])
def test_stages_in_a_v_are_idle_only_until_the_last_worker_has_begun(workers, micro_batches):
    """ZB-V with parts that all take the same: a worker waits for as many tasks as there are other workers."""
    count = 2 * workers
    profile = make_profile(work=[1e-3] * count, slowness=[1] * workers, batch=micro_batches, latency=0, bandwidth=1e30)
    measured = tuple(replace(each, update_s=0.0) for each in in_parts(profile, share=0.5).measurements)
    placed = [(min(n, count - 1 - n), [f"p{n}"]) for n in range(count)]
    plan = make_plan(profile, placed, micro_batches=micro_batches)
    tasks = PlacedTasks(plan, CostModel(replace(profile, measurements=measured)), split=True)
    orders = zero_bubble(tasks)
    assert orders is not None
    least = 1e-3 * (6 * micro_batches + workers - 1)
    if micro_batches >= count - 1:
        assert tasks.step_s(orders) == pytest.approx(least)
    else:
        assert tasks.step_s(orders) > least


def test_an_order_that_keeps_too_much_is_followed_as_far_as_there_is_room():
    """ZB-H1 with room for two micro-batches fewer on its first worker: the same tasks, within memory."""
    profile = in_parts(make_profile(work=[1e-3] * 4, slowness=[1] * 4, batch=8), share=0.5)
    plan = make_plan(profile, [(n, [f"p{n}"]) for n in range(4)], micro_batches=8)
    parts = PlacedTasks(plan, CostModel(profile), split=True)
    handmade = zero_bubble(parts)
    assert handmade is not None
    spare = parts.room[0] - parts.peak(handmade[0]) + 2 * parts.kept[0, 0]
    first, *others = profile.workers
    first = replace(first, memory_bytes=first.capacity_bytes - spare + 1)
    tight = PlacedTasks(plan, CostModel(replace(profile, workers=(first, *others))), split=True)
    assert not tight.fits(handmade)
    found = made_to_fit(tight, handmade)
    assert found is not None
    assert tight.fits(found)
    assert list(map(sorted, found)) == list(map(sorted, handmade))
    assert tight.step_s(found) >= parts.step_s(handmade)


@pytest.mark.parametrize("micro_batches", [2, 4, 9])
def test_two_parts_fill_the_end_of_a_step(micro_batches):
    """Four equal stages: never longer than ZB-H1 or 1F1B in ZB-H1's memory, and no order beats the bound."""
    profile = in_parts(make_profile(work=[1e-3] * 4, slowness=[1] * 4, batch=micro_batches), share=0.5)
    plan = make_plan(profile, [(n, [f"p{n}"]) for n in range(4)], micro_batches=micro_batches)
    cost = CostModel(profile)
    whole, parts = PlacedTasks(replace(plan, schedule="1f1b"), cost), PlacedTasks(plan, cost, split=True)
    handmade = zero_bubble(parts)
    assert handmade is not None
    found = best_orders(parts, most=BUDGET)
    assert found is not None
    one = whole.of_steps([order_of(whole.plan, worker) for worker in plan.workers])
    assert found.bound_s <= found.step_s <= parts.step_s(handmade) < whole.step_s(one)


def test_two_parts_are_listed_where_they_were_measured():
    """Three equal stages that cannot be shared: with the parts' prices the plan is shorter, and has them in it."""
    profile = make_profile(work=[4e-3] * 3, slowness=[1] * 3, batch=6, latency=1e-5)
    asked = SolveOptions(max_replicas=1, micro_batches=6, apart=(("p0", "p1", "p2"),))
    whole, plan = solve(profile, asked).plan, solve(in_parts(profile), replace(asked, schedule="listed")).plan
    assert plan.schedule == "listed"
    assert "I" in "".join(plan.orders.values())
    assert plan.predicted.step_s < 0.97 * whole.predicted.step_s
    assert decode(Plan, encode(plan)) == plan


def tiny(seed):
    rng = random.Random(seed)
    stages, micro_batches = rng.choice([(2, 3), (3, 2), (3, 3)])
    plan, profile = drawn_plan(
        seed, partitions=stages, workers=rng.choice([2, 3]), micro_batches=micro_batches, stages=stages
    )
    return plan, tightened(profile, plan, rng.choice([1.0, 0.67, 0.34]))


@pytest.mark.parametrize("seed", sweep(range(30), quick=16))
def test_a_tiny_placement_has_the_best_of_all_its_orders(seed):
    """Up to three stages and micro-batches: what is found takes as long as the best of every order, and is proven.

    No order beats the bound of the placement, from work, heads and tails, either.
    """
    plan, profile = tiny(seed)
    tasks = PlacedTasks(plan, CostModel(profile))
    every = EveryOrder(tasks)
    assert every.run() is not None
    assert every.finished
    found = best_orders(tasks, most=BUDGET)
    assert found is not None
    assert found.step_s == pytest.approx(every.value, rel=1e-9)
    assert found.bound_s == pytest.approx(every.value, rel=1e-9)
    assert least_step_s(tasks) <= every.value * (1 + 1e-9)


def test_every_order_finds_what_all_interleavings_give():
    """Two stages on one worker each, two micro-batches: the same best step as of all pairs of orders simulated."""
    profile = make_profile(work=[1e-3, 3e-3], slowness=[1, 1], batch=2, bandwidth=1e7, busy=0.5)
    cost = CostModel(profile)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=2)
    tasks = PlacedTasks(plan, cost)
    every = EveryOrder(tasks)
    every.run()
    mine = [[task for task in range(tasks.count) if tasks.row(task).worker == worker] for worker in (0, 1)]
    found = []
    for first, second in itertools.product(*map(itertools.permutations, mine)):
        if all(
            order.index(before) < order.index(later)
            for order in (first, second)
            for before in order
            for later in tasks.behind[before]
        ):
            try:
                found.append(tasks.step_s([list(first), list(second)]))
            except FormatError:  # it waits for itself
                continue
    assert every.value == min(found)


@pytest.mark.parametrize("seed", sweep(range(16), quick=6))
def test_named_schedules_are_never_better_on_the_same_placement(seed):
    """GPipe, interleaved, interleaved 1F1B and 1F1B with drawn depths, where they fit: starts of the search."""
    plan, profile = drawn_plan(seed, micro_batches=6)
    rng = random.Random(seed)
    if len(plan.stages) == len(plan.workers):
        depths = sorted((rng.randint(1, 6) for _ in plan.stages), reverse=True)
        stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
        plan = replace(plan, schedule="1f1b", stages=stages)
    profile = tightened(profile, plan, (1.0, 0.5)[seed % 2])
    tasks = PlacedTasks(plan, CostModel(profile))
    named = [orders for _, orders in named_orders(plan, tasks) if tasks.fits(orders)]
    found = best_orders(tasks, named, most=BUDGET)
    assert found is not None
    assert tasks.fits(found.orders)
    for orders in named:
        assert found.step_s <= tasks.step_s(orders) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_only_make_an_order_better(seed):
    """From the worst of all rules: never longer, never above memory, and what is returned takes what is said."""
    plan, profile = drawn_plan(seed, micro_batches=6)
    profile = tightened(profile, plan, 0.5)
    tasks = PlacedTasks(plan, CostModel(profile))
    found = [orders for rule in RULES if (orders := list_schedule(tasks, rule)) is not None]
    worst = max(found, key=tasks.step_s)
    orders, value = Exchanges(tasks, most=BUDGET).run(worst, tasks.step_s(worst))
    assert value == tasks.step_s(orders) <= tasks.step_s(worst)
    assert tasks.fits(orders)


def test_exchanges_get_down_from_an_order_that_is_made_bad():
    """Two workers that could run side by side take turns under GPipe in reverse; exchanges overlap them."""
    profile = make_profile(work=[2e-3, 2e-3], slowness=[1, 1], batch=6)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=6)
    tasks = PlacedTasks(plan, CostModel(profile))
    bad = tasks.of_steps([order_of(replace(plan, schedule="1f1b", stages=tuple(
        replace(stage, in_flight=1) for stage in plan.stages)), worker) for worker in plan.workers])  # fmt: skip
    orders, value = Exchanges(tasks, most=200_000).run(bad, tasks.step_s(bad))
    assert value < 0.8 * tasks.step_s(bad)
    assert value == pytest.approx(least_step_s(tasks), rel=0.02)
    assert tasks.fits(orders)


def test_a_stage_for_which_there_is_no_room_has_no_order():
    """A worker that cannot keep one micro-batch of each of its stages is told so by every way to an order."""
    plan, profile = drawn_plan(1)
    small = tightened(profile, plan, 0.0)
    tasks = PlacedTasks(plan, CostModel(small))
    workers = tuple(replace(each, memory_bytes=each.memory_bytes - max(tasks.kept.values())) for each in small.workers)
    tasks = PlacedTasks(plan, CostModel(replace(small, workers=workers)))
    assert list_schedule(tasks, RULES[0]) is None
    assert best_orders(tasks, most=BUDGET) is None
    assert EveryOrder(tasks).run() is None
    assert least_step_s(tasks) == float("inf")


@pytest.mark.long
@pytest.mark.parametrize("seed", sweep(range(8), quick=4))
def test_no_baseline_is_faster_than_the_plan(seed, monkeypatch):
    """Over drawn instances, with one worker a stage or several: by our own prices nothing simpler wins."""
    monkeypatch.setattr(tuning, "LISTED_TASKS", 40_000)
    profile = random_instance(
        seed, partitions=5, workers=3, busy=seed % 2 == 0, graph=seed % 4 == 0, tight=seed % 3 == 0, batch=4
    )
    plan = solve(profile, SolveOptions(max_replicas=1 if seed % 2 else None)).plan
    for each in plan.baselines:
        if each.step_s is not None and not (seed % 2 and each.name.startswith("data parallel")):
            assert plan.predicted.step_s <= each.step_s * (1 + 1e-6), each.name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_beats_the_bound_of_all(seed):
    """Whatever is found, replicas and several stages a worker among them, takes the perfect split's time or more."""
    profile = random_instance(seed, partitions=5, workers=3, busy=seed % 2 == 0, batch=4)
    plan = solve(profile, SolveOptions()).plan
    resolved = resolve(profile, SolveOptions())
    problem = Problem(*resolved, CostModel(resolved[0]))
    bound = least_of_all_s(problem, SolveOptions().counts(problem.cost))
    assert 0 < bound <= plan.predicted.step_s
    assert plan.solver.any_order_s == bound
    for each in plan.baselines:
        assert each.step_s is None or bound <= each.step_s


def test_the_bound_of_all_knows_that_a_weight_part_may_wait():
    """One micro-batch through three workers and back: those in front wait for input parts alone: 3 + 3 and a rest."""
    profile = make_profile(work=[1.0] * 3, slowness=[1] * 3, batch=1, edge_bytes=1.0, latency=1e-6)
    parts = [replace(each, update_s=0.0) for each in in_parts(profile, share=0.5).measurements]
    profile = replace(profile, measurements=tuple(parts))
    plan = solve(profile, SolveOptions(micro_batches=1, max_replicas=1)).plan
    assert least_of_all_s(Problem(*resolve(profile, SolveOptions()), CostModel(profile)), [1]) <= 7.01
    found = min(plan.predicted.step_s, plan.solver.any_order_found_s or plan.predicted.step_s)
    assert plan.solver.any_order_s <= found


def test_a_bound_of_steps_is_none_of_money():
    """What any order takes at least is told of a step alone: the cheapest plan's value is money."""
    profile = make_profile(work=[2e-3, 4e-3], slowness=[1, 2])
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    solver = solve(profile, SolveOptions(objective="cost")).plan.solver
    assert solver.any_order_s is None


def uneven():
    """Three partitions: two workers share the work evenly only if one of them has the first and the last."""
    return make_profile(work=[2e-3, 4e-3, 2e-3], slowness=[1, 1], batch=8, edge_bytes=1e3, capacity=CAPACITY)


def test_auto_takes_several_stages_a_worker_where_they_are_faster():
    """One stage a worker leaves 2 : 6 or 6 : 2 at best; the plan has 4 : 4, and says of which plans its bound is."""
    one = SolveOptions(schedule="one-stage", max_replicas=1, micro_batches=8)
    simple, plan = solve(uneven(), one).plan, solve(uneven(), replace(one, schedule="auto")).plan
    assert simple.solver.status == "optimal"
    assert plan.predicted.step_s < 0.9 * simple.predicted.step_s
    assert len(plan.stages) == 3
    assert plan.solver.bound_s == plan.solver.any_order_s < plan.predicted.step_s
    assert plan.solver.scope == "plans with any number of stages a worker in any order with 8 micro-batches"
    named = [each for each in plan.candidates if each.schedule in ("gpipe", "1f1b")]
    assert all(each.status == "proven worse" for each in named)
    told = [line.text for line in proof_lines(plan)]
    assert "status: feasible: within" in told[0]
    assert "with any number of stages a worker, in any order" in told[0]
    assert told[-1].startswith("gpipe and 1f1b, with one stage a worker and updates undivided, take ")
    assert "in any order, no faster plan was found" not in "".join(told)


@pytest.mark.parametrize("schedule", ["auto", "listed"])
def test_open_schedules_find_what_interleaved_finds(schedule):
    """Where memory is so tight that local search is stuck far above, the first and the last share a worker."""
    profile = make_profile(
        work=[1e-3, 4e-3, 1e-3], slowness=[1.0, 2.0], batch=2, edge_bytes=1e3, activation=1e4, capacity=[6e6, 9e6]
    )
    found = solve(profile, SolveOptions(schedule="interleaved")).plan
    assert solve(profile, SolveOptions(schedule=schedule)).plan.predicted.step_s <= found.predicted.step_s
    assert found.predicted.step_s < 0.7 * solve(profile, SolveOptions(schedule="one-stage")).plan.predicted.step_s


@pytest.mark.parametrize("schedule", ["auto", "listed"])
def test_what_only_several_stages_a_worker_can_keep_to_is_no_infeasible_problem(schedule, monkeypatch):
    """Pins in turn: no cut into one stage a worker keeps to them, and a plan with two does."""
    monkeypatch.setattr(tuning, "MOST_S", 0.5)  # ways out are not asked for here
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 1.0])
    pins = {"p0": "worker:1", "p1": "worker:2", "p3": "worker:1"}
    with pytest.raises(InfeasibleError):
        solve(profile, SolveOptions(schedule="one-stage", pins=pins))
    plan = solve(profile, SolveOptions(schedule=schedule, pins=pins)).plan
    assert {name: plan.placement[name] for name in pins} == {name: f"{pin}/cpu" for name, pin in pins.items()}
    assert not overfull(plan.predicted)


def test_a_named_schedule_stays_where_a_listed_one_gains_next_to_nothing(monkeypatch):
    """Orders that gain less than is asked for are not worth a plan that lists them; the answer says what there is."""
    options = SolveOptions(max_replicas=1, micro_batches=8)
    monkeypatch.setattr(tuning, "LISTED_GAIN", 0.0)
    faster_s = solve(uneven(), options).plan.predicted.step_s
    monkeypatch.setattr(tuning, "LISTED_GAIN", 0.9)
    plan = solve(uneven(), options).plan
    assert plan.schedule in ("gpipe", "1f1b", "interleaved", "interleaved-1f1b")
    assert plan.solver.any_order_found_s == pytest.approx(faster_s)
    told = "".join(line.text for line in proof_lines(plan))
    assert "was found, " in told
    assert "no faster plan was found" not in told


def test_listed_is_what_was_asked_for():
    """With --schedule listed the plan lists its orders, even where a named schedule has the same."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1, 1], batch=4)
    plan = solve(profile, SolveOptions(schedule="listed", max_replicas=1)).plan
    named = solve(profile, SolveOptions(schedule="one-stage", max_replicas=1)).plan
    assert plan.schedule == "listed"
    assert set(plan.orders) == set(plan.workers)
    assert plan.predicted.step_s <= named.predicted.step_s * (1 + 1e-9)
    assert plan.solver.options["schedule"] == "listed"


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_listed_is_for_the_step_time_alone(objective):
    """What another objective asks of an order nobody has solved, and that is said."""
    with pytest.raises(UsageError, match="schedule listed is solved for objective step only"):
        solve(uneven(), SolveOptions(schedule="listed", objective=objective))


def test_hints_hold_for_listed_plans():
    """Pins, partitions kept apart and together, and workers left out: no placement breaks them."""
    options = SolveOptions(
        schedule="listed",
        max_replicas=1,
        micro_batches=4,
        pins={"p0": "worker:1"},
        apart=(("p0", "p2"),),
        max_workers=2,
    )
    plan = solve(uneven(), options).plan
    where = plan.placement
    assert where["p0"] == "worker:1/cpu"
    assert where["p2"] != where["p0"]


def test_a_profile_with_one_size_is_solved():
    """Listed orders are looked for at the numbers of micro-batches that it can price."""
    profile = make_profile(work=[1e-3, 2e-3, 3e-3, 1e-3], slowness=[1.0, 1.5])
    alone = replace(profile, measurements=tuple(each for each in profile.measurements if each.micro_batch == 4))
    assert solve(alone, SolveOptions()).plan.micro_batch_size == 4
