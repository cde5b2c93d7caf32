"""The simulator says what the cost model's page says: formulas for chains, order, busy shares, links."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from brute_force import random_instance
from builders import make_plan, make_profile, worker_name

from assigner.errors import FormatError
from assigner.formats.profile import Link, LinkPoint, Profile, Tie
from assigner.schedule.cost import CostModel
from assigner.schedule.program import Action, ActionKind, build_program
from assigner.schedule.simulate import check_step, overfull, predict, priced, run_program, step_s

UPDATE = 1e-4


def chain_formula(f: list[float], b: list[float], c: list[float], c_back: list[float], m: int, u: list[float]) -> float:
    """The step time of a chain of stages under GPipe without busy shares (3-cost-model.md)."""
    forward = sum(f) + sum(c) + (m - 1) * max(f + c)
    ends = [forward + sum(b[s:]) + sum(c_back[s:]) + (m - 1) * max(b[s:] + c_back[s:]) + u[s] for s in range(len(f))]
    return max(ends)


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_under_gpipe_takes_the_sum_and_m_minus_one_times_the_slowest(seed: int) -> None:
    """Simulated step time equals the closed formula, for random chains, wires and micro-batch counts."""
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    m = rng.choice([1, 2, 4, 8])
    work = [rng.uniform(1e-3, 5e-3) for _ in range(stages)]
    slow = [rng.choice([1.0, 2.0, 3.0]) for _ in range(stages)]
    profile = make_profile(work=work, slowness=slow, bandwidth=rng.choice([1e7, 1e9]), edge_bytes=rng.uniform(1e4, 1e6))
    plan = make_plan(profile, [(s, [f"p{s}"]) for s in range(stages)], micro_batches=m)
    cost, size = CostModel(profile), 8 // m
    prices = [cost.partition(f"p{s}", worker_name(s), size) for s in range(stages)]
    bytes_ = profile.edges[0].bytes_per_sample * size if stages > 1 else 0
    there = [cost.transfer_s(worker_name(s), worker_name(s + 1), bytes_) for s in range(stages - 1)]
    back = [cost.transfer_s(worker_name(s + 1), worker_name(s), bytes_) for s in range(stages - 1)]
    expected = chain_formula(
        [p.forward_s for p in prices], [p.backward_s for p in prices], there, back, m, [p.update_s for p in prices]
    )
    assert predict(plan, profile).step_s == pytest.approx(expected, rel=1e-12)


def test_remat_adds_a_forward_to_the_backward() -> None:
    """On one worker a rematerialised partition costs one more forward per micro-batch."""
    profile = make_profile(work=[1e-3, 2e-3], slowness=[1.0])
    plan = make_plan(profile, [(0, ["p0", "p1"])], micro_batches=4)
    again = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p1",)),))
    assert predict(again, profile).step_s - predict(plan, profile).step_s == pytest.approx(4 * 2 * 2e-3)


def test_busy_shares_hold_the_worker_and_not_the_message() -> None:
    """A sender is busy after its action, a receiver after the action that used the message; the message is on time."""
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0], busy=0.5, edge_bytes=1e6, bandwidth=1e9, latency=0.0)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=8)
    timeline = run_program(build_program(plan, profile.edges), CostModel(profile))
    wire = 1e-3  # 1e6 bytes at 1e9 a second
    starts = [e.start_s for e in timeline.events if e.worker == worker_name(0) and e.action.kind is ActionKind.FORWARD]
    assert starts[1] - starts[0] == pytest.approx(1e-3 + 0.5 * wire)
    first = next(e for e in timeline.events if e.worker == worker_name(1) and e.action.kind is ActionKind.FORWARD)
    assert first.start_s == pytest.approx(1e-3 + wire)
    second = [e for e in timeline.events if e.worker == worker_name(1) and e.action.kind is ActionKind.FORWARD][1]
    assert second.start_s == pytest.approx(max(starts[1] + 1e-3 + wire, first.end_s + 0.5 * wire))


def test_a_link_carries_one_message_at_a_time() -> None:
    """Messages on one link queue; messages on two links do not."""
    profile = make_profile(
        work=[1e-3] * 3, slowness=[1.0] * 3, edges=[(0, 1), (0, 2), (1, 2)], edge_bytes=1e7, latency=0.0, batch=2
    )
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])], micro_batches=2)
    timeline = run_program(build_program(plan, profile.edges), CostModel(profile))
    sends = [e for e in timeline.events if e.action.route is not None and e.action.route.payload == "activation"]
    by_link: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in sends:
        by_link.setdefault((event.action.route.source, event.action.route.target), []).append(
            (event.start_s, event.end_s)
        )
    for spans in by_link.values():
        assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(spans))
    skip, near = by_link[worker_name(0), worker_name(2)][0], by_link[worker_name(0), worker_name(1)][0]
    assert skip[0] == near[0]  # straight from producer to each reader


def test_an_output_for_several_partitions_of_a_worker_travels_once() -> None:
    """Two readers on one worker share one message, and one gradient comes back."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2, edges=[(0, 1), (0, 2), (1, 2)])
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1", "p2"])], micro_batches=2)
    program = build_program(plan, profile.edges)
    assert [(route.payload, route.partition) for route in program.routes] == [("activation", "p0"), ("gradient", "p0")]


def test_an_edge_without_gradient_sends_nothing_back() -> None:
    """A backward message exists where the edge bears a gradient."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2)
    profile = replace(profile, edges=(replace(profile.edges[0], gradient=False),))
    program = build_program(make_plan(profile, [(0, ["p0"]), (1, ["p1"])]), profile.edges)
    assert [route.payload for route in program.routes] == ["activation"]


def test_one_f_one_b_keeps_to_its_warm_up() -> None:
    """Stage s of S starts with S - s forwards, or its own depth, then takes one backward and one forward in turn."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 3)
    plan = replace(make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])], micro_batches=8), schedule="1f1b")
    program = build_program(plan, profile.edges)

    def order(worker: int) -> str:
        names = {ActionKind.FORWARD: "F", ActionKind.BACKWARD: "B", ActionKind.UPDATE: "U"}
        actions: tuple[Action, ...] = program.actions[worker_name(worker)]
        return "".join(names[action.kind] for action in actions if action.kind in names)

    assert order(0) == "FFF" + "BF" * 5 + "BBB" + "U"
    assert order(2) == "F" + "BF" * 7 + "B" + "U"
    deep = replace(plan, stages=(replace(plan.stages[0], in_flight=5), *plan.stages[1:]))
    first = [a.kind for a in build_program(deep, profile.edges).actions[worker_name(0)] if a.route is None]
    assert first.index(ActionKind.BACKWARD) == 5
    held = predict(deep, profile).workers[0].memory.activations
    assert held == pytest.approx(predict(plan, profile).workers[0].memory.activations * 5 / 3)


def test_interleaved_runs_stage_by_stage() -> None:
    """A worker with two stages runs all forwards of the first, then of the second; backwards the other way round."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (0, ["p2"])], micro_batches=2)
    program = build_program(replace(plan, schedule="interleaved"), profile.edges)
    done = [(a.kind.value[0], a.stage, a.micro_batch) for a in program.actions[worker_name(0)] if a.route is None]
    assert done == [
        ("f", 0, 0), ("f", 0, 1), ("f", 2, 0), ("f", 2, 1),
        ("b", 2, 1), ("b", 2, 0), ("b", 0, 1), ("b", 0, 0), ("u", -1, -1),
    ]  # fmt: skip
    with pytest.raises(FormatError, match=r"1f1b: worker:0/cpu holds 2 stages"):
        build_program(replace(plan, schedule="1f1b"), profile.edges)


def test_interleaved_with_one_stage_a_worker_is_gpipe() -> None:
    """The same actions in the same order, the same memory."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 3)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])])
    other = replace(plan, schedule="interleaved")
    assert build_program(plan, profile.edges).actions == build_program(other, profile.edges).actions
    assert predict(plan, profile) == predict(other, profile)


@pytest.mark.parametrize("seed", range(30))
def test_the_step_time_alone_is_that_of_the_timeline(seed: int) -> None:
    """To the last bit, under every schedule, with ties, skips and busy links; it is the end of the last event."""
    rng = random.Random(seed)
    profile = random_instance(seed, partitions=7, workers=4, busy=seed % 2 == 0, graph=seed % 3 > 0, batch=4)
    schedule = rng.choice(["gpipe", "1f1b", "interleaved"])
    cuts = sorted(rng.sample(range(1, 7), rng.randint(0, 3 if schedule == "1f1b" else 6)))
    workers = rng.sample(range(4), 4)
    stages = [
        (workers[n % 4], profile.order[a:b]) for n, (a, b) in enumerate(itertools.pairwise([0, *cuts, 7]))
    ]  # fmt: skip
    plan = replace(make_plan(profile, stages, micro_batches=rng.choice([1, 2, 4])), schedule=schedule)
    plan = replace(plan, stages=tuple(replace(each, rematerialise=each.partitions[::2]) for each in plan.stages))
    timeline = run_program(build_program(plan, profile.edges, profile.ties), CostModel(profile))
    assert step_s(plan, CostModel(profile)) == timeline.step_s == max(event.end_s for event in timeline.events)
    assert len(timeline.events) == sum(
        action.kind is not ActionKind.RECEIVE for actions in timeline.program.actions.values() for action in actions
    )


def test_a_program_that_waits_for_itself_is_refused() -> None:
    """Two workers that each wait for what the other runs later: the error says who waits before what."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0] * 2, edges=[(0, 2), (1, 3)])
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (1, ["p2"]), (0, ["p3"])])
    program = build_program(plan, profile.edges)
    turned = {}
    for worker, actions in program.actions.items():
        own = [a for a in actions if a.micro_batch >= 0]
        late = {worker_name(0): 3, worker_name(1): 2}[worker]
        turned[worker] = (*(a for a in own if a.stage == late), *(a for a in own if a.stage != late), actions[-1])
    with pytest.raises(FormatError, match=r"waits for ever before forward of stage"):
        run_program(replace(program, actions=turned), CostModel(profile))


@pytest.mark.parametrize("seed", range(30))
def test_depths_that_wait_for_ever_are_refused(seed: int) -> None:
    """1f1b with any depths: a program is built where the simulator comes to an end, and only there."""
    rng = random.Random(seed)
    profile = random_instance(seed, partitions=6, workers=3, graph=seed % 2 > 0, batch=8)
    edges = [replace(each, gradient=rng.random() < 0.7) for each in profile.edges] if seed % 3 else profile.edges
    profile = replace(profile, edges=tuple(edges))
    plan = make_plan(profile, [(n, profile.order[2 * n : 2 * n + 2]) for n in range(3)], micro_batches=4)
    stages = tuple(replace(each, in_flight=rng.choice([None, 1, 2, 3, 4])) for each in plan.stages)
    plan = replace(plan, schedule="1f1b", stages=stages)
    try:
        assert step_s(plan, CostModel(profile)) > 0
    except FormatError:
        with pytest.raises(FormatError, match=r"in_flight: the program would wait for ever"):
            build_program(plan, profile.edges, profile.ties)
    else:
        assert build_program(plan, profile.edges, profile.ties).routes


def test_ties_across_workers_send_their_gradients_each_way() -> None:
    """A shared parameter on two workers costs one message each way after the last backward, before the update."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2, latency=0.0)
    tied = replace(profile, ties=(Tie("w", ("p0", "p1"), int(1e6)),))
    stages = [(0, ["p0"]), (1, ["p1"])]
    plain, shared = (predict(make_plan(each, stages), each) for each in (profile, tied))
    assert shared.step_s - plain.step_s == pytest.approx(1e-3, rel=1e-6)


def test_the_parts_of_a_workers_step_add_up() -> None:
    """Compute, transfer and idle time of every worker make the step time; the bubble is their idle share."""
    profile = make_profile(work=[1e-3, 4e-3, 2e-3], slowness=[1.0, 2.0, 1.0], bandwidth=1e7)
    said = predict(make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])]), profile)
    for worker in said.workers:
        assert worker.compute_s + worker.transfer_s + worker.idle_s == pytest.approx(said.step_s)
        assert worker.idle_s >= 0
        assert worker.peak_bytes == worker.memory.total
    assert said.bubble_fraction == pytest.approx(1 - sum(w.compute_s for w in said.workers) / (3 * said.step_s))
    assert said.samples_per_s == pytest.approx(8 / said.step_s)


def test_a_worker_that_is_never_idle_is_not_so_by_rounding() -> None:
    """A plan with idle seconds below 0 could not be read; of these, one in 40 had such ones."""
    for seed in range(40):
        drawn = random.Random(seed)
        work = [drawn.uniform(0.5, 1.5), drawn.uniform(0.5, 1.5), 0.1]
        profile = make_profile(
            work=work, slowness=[1.0, 1.0], bandwidth=drawn.uniform(1e6, 1e7), busy=0.5, batch=2,
        )  # fmt: skip
        within, to_last = profile.edges
        profile = replace(profile, edges=(within, replace(to_last, gradient=False)))
        plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2"])], micro_batches=1)
        assert predict(plan, profile).workers[0].idle_s == pytest.approx(0, abs=1e-12)
        assert predict(plan, profile).workers[0].idle_s >= 0


def test_what_a_worker_computes_and_what_messages_take_of_it_is_told() -> None:
    """Forward and update are parts of the computing; busy is the rest of its day with messages, within the step.

    A message of 1 MB takes 10 ms and keeps each of its ends busy for 2 ms of them; one goes each way for a micro-batch.
    """
    points = {"bandwidth": 1e8, "latency": 0.0, "edge_bytes": 1e6, "busy": 0.2}
    profile = make_profile(work=[1e-3, 2e-3], slowness=[1.0, 2.0], batch=4, **points)
    said = predict(make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=4), profile)
    first, second = said.workers
    assert first.busy_s == pytest.approx(4 * 2 * 2e-3)
    assert second.busy_s == pytest.approx(4 * 2 * 2e-3)
    assert (first.forward_s, second.forward_s) == (pytest.approx(4 * 1e-3), pytest.approx(4 * 4e-3))
    assert (first.update_s, second.update_s) == (pytest.approx(1e-4), pytest.approx(2e-4))
    assert first.compute_s == pytest.approx(3 * first.forward_s + first.update_s)
    for worker in said.workers:
        assert worker.occupied_s == worker.compute_s + worker.busy_s <= said.step_s
        assert worker.busy_s <= worker.transfer_s + worker.idle_s


def test_too_little_memory_is_told() -> None:
    """A worker whose peak is above its capacity is named."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2, capacity=[1e7, 1e9])
    said = predict(make_plan(profile, [(0, ["p0"]), (1, ["p1"])]), profile)
    assert [worker.worker for worker in overfull(said)] == [worker_name(0)]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(0, ["p1"]), (1, ["p0"])], "runs later"),
        ([(0, ["p0"])], r"places 1 partition nowhere: 'p1'\nhint: .* --complete"),
        ([(0, ["p0"]), (7, ["p1"])], "worker:7/cpu"),
        ([(0, ["p0"]), (1, ["p9"])], "p9"),
    ],
)
def test_a_plan_that_does_not_fit_the_profile_is_refused(stages: list, message: str) -> None:
    """Wrong order, missing or unknown partitions and workers are format errors."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2)
    with pytest.raises(FormatError, match=message):
        predict(make_plan(profile, stages), profile)


def test_a_plan_of_another_workload_is_refused() -> None:
    """Fingerprints must be equal."""
    profile = make_profile(work=[1e-3], slowness=[1.0])
    plan = make_plan(profile, [(0, ["p0"])])
    other = replace(plan, workload=replace(plan.workload, fingerprint="sha256:ff"))
    with pytest.raises(FormatError, match="sha256:ff"):
        predict(other, profile)


def test_a_missing_link_is_named() -> None:
    """A plan that needs a link which was not measured is refused with both ends."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 2)
    profile = replace(profile, links=(Link(worker_name(0), worker_name(1), (LinkPoint(1, 1),)),))
    with pytest.raises(FormatError, match=r"from worker:1/cpu to worker:0/cpu"):
        predict(make_plan(profile, [(0, ["p0"]), (1, ["p1"])]), profile)


def test_a_step_without_time_names_the_line_that_falls():
    """Micro-batches of 1 and 2 were measured, and the line reaches 0 before 8; zeros that were measured are none."""
    profile = make_profile(work=[1e-3], slowness=[1.0])
    first = profile.measurements[0]

    def measured(*seconds: float) -> Profile:
        return replace(profile, measurements=tuple(
            replace(first, micro_batch=size, forward_s=each, backward_s=each, update_s=0.0)
            for size, each in enumerate(seconds, 1)
        ))  # fmt: skip

    plan = make_plan(profile, [(0, ["p0"])], micro_batches=1)
    falling, still = measured(2e-3, 1e-3), measured(0.0, 0.0)
    with pytest.raises(FormatError, match=r"'p0' takes on worker:0/cpu falls to 0 .* at a micro-batch of 8") as caught:
        check_step(priced(plan, falling), falling)
    assert "with 8 among them" in caught.value.hint
    check_step(priced(plan, still), still)
    check_step(priced(plan, measured(1e-3, 2e-3)), falling)
