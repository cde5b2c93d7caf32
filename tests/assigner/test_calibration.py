"""A profile corrected by a trace: it recovers the truth, and solving from it again is better in the truth."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile, on_devices, worker_name
from drawn_plans import drawn
from made_runs import run_in, slower_link, slower_worker, with_busy

from assigner.formats.profile import Collective, LinkPoint, Profile, load_profile, save_profile
from assigner.formats.profilewarnings import other_warnings, with_warnings
from assigner.formats.stage import Replica
from assigner.samples import Samples
from assigner.schedule.cost import CostModel, message_s
from assigner.schedule.simulate import predict, step_s, worker_memory
from assigner.solver import SolveOptions, solve
from assigner.validation.calibration import calibrated, corrected_link
from assigner.validation.comparison import agree

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.trace import Trace

NAMES = [f"p{i}" for i in range(12)]
PROFILE = make_profile(work=[2e-3] * 12, slowness=[1.0, 1.0, 1.0], bandwidth=2e8, edge_bytes=2e5, batch=16)
PLAN = make_plan(PROFILE, [(0, NAMES[:4]), (1, NAMES[4:8]), (2, NAMES[8:])], micro_batches=4)


def corrected(profile: Profile, plan: Plan, trace: Trace) -> Profile:
    return calibrated(profile, agree(plan, profile, trace), trace="trace.json")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(20))
def test_the_truth_is_recovered_to_1_percent(seed: int, schedule: str) -> None:
    """One worker 20 % slower, all links that leave another half as fast: the plan's step time is the true one again.

    Of a link on which nobody ever waits nothing is learned: such a link hardly matters to the step.
    """
    profile, plan = drawn(seed, schedule)
    truth = slower_worker(profile, 1, forward=1.2, backward=1.2)
    for rank in (0, 1, 3):
        truth = slower_link(truth, 2, rank, 2.0)
    now = corrected(profile, plan, run_in(truth, plan))
    measured = step_s(plan, CostModel(truth))
    assert step_s(plan, CostModel(now)) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_what_held_the_worker_is_recovered_by_itself(seed: int) -> None:
    """Forward, backward and update of every traced partition, at every size, and the messages that were seen."""
    profile, plan = drawn(2 * seed, "1f1b")
    truth = slower_link(slower_worker(profile, 1, forward=1.3, backward=0.8), 0, 1, 2.0)
    found = agree(plan, profile, run_in(truth, plan))
    now, real = CostModel(calibrated(profile, found, trace="t")), CostModel(truth)
    for stage in plan.stages:
        for name in stage.partitions:
            for size in (1, 4):
                mine, its = now.partition(name, stage.worker, size), real.partition(name, stage.worker, size)
                assert (mine.forward_s, mine.backward_s, mine.update_s) == pytest.approx(
                    (its.forward_s, its.backward_s, its.update_s)
                )
    for each in found.routes:
        if each.once.measured_s is not None:
            ends = each.route.source, each.route.target
            assert now.transfer_s(*ends, each.bytes) == pytest.approx(real.transfer_s(*ends, each.bytes))


def test_partitions_that_the_worker_did_not_hold_get_its_own_ratio() -> None:
    """The ratio over all its stages; another worker's figures stay."""
    now = CostModel(corrected(PROFILE, PLAN, run_in(slower_worker(PROFILE, 1, forward=1.5, backward=1.2), PLAN)))
    before = CostModel(PROFILE)
    for size in (1, 4):
        mine, was = (cost.partition("p0", worker_name(1), size) for cost in (now, before))
        assert (mine.forward_s, mine.backward_s) == pytest.approx((1.5 * was.forward_s, 1.2 * was.backward_s))
        assert now.partition("p0", worker_name(0), size).forward_s == pytest.approx(
            before.partition("p0", worker_name(0), size).forward_s
        )


def test_what_workers_lose_after_their_actions_corrects_the_busy_shares() -> None:
    """Shares that the profile has not are found, and those that it has too large are brought down."""
    for said, real in ((0.0, 0.6), (0.6, 0.2)):
        profile, truth = with_busy(PROFILE, said), with_busy(PROFILE, real)
        new = corrected(profile, PLAN, run_in(truth, PLAN))
        link = next(each for each in new.links if (each.source, each.target) == (worker_name(0), worker_name(1)))
        assert (link.sender_busy, link.receiver_busy) == pytest.approx((real, real))
        assert step_s(PLAN, CostModel(new)) == pytest.approx(step_s(PLAN, CostModel(truth)))


def test_what_a_worker_loses_above_its_messages_is_part_of_its_actions() -> None:
    """A worker that takes 3 ms to begin anything, whether it has messages or not, is predicted to take them."""
    plan = make_plan(PROFILE, [(0, NAMES)], micro_batches=4)
    plain, gap = run_in(PROFILE, plan, steps=1), 3e-3
    (worker,) = plain.workers
    whole, *actions = worker.actions
    late = (
        replace(whole, end_s=whole.end_s + 8 * gap),
        *(replace(each, start_s=each.start_s + n * gap, end_s=each.end_s + n * gap) for n, each in enumerate(actions)),
    )
    found = agree(plan, PROFILE, replace(plain, workers=(replace(worker, actions=late),)))
    assert found.explanation.overheads_s == pytest.approx(8 * gap)
    new = calibrated(PROFILE, found, trace="t")
    assert step_s(plan, CostModel(new)) == pytest.approx(found.step.measured_s)


def test_a_rematerialised_forward_is_not_counted_against_the_backward() -> None:
    """A slow forward that runs again in the backward leaves the backward's own time as it was."""
    plan = replace(PLAN, stages=tuple(replace(each, rematerialise=each.partitions) for each in PLAN.stages))
    now = CostModel(corrected(PROFILE, plan, run_in(slower_worker(PROFILE, 0, forward=2.0), plan)))
    before = CostModel(PROFILE).partition("p1", worker_name(0), 4)
    price = now.partition("p1", worker_name(0), 4)
    assert (price.forward_s, price.backward_s) == pytest.approx((2 * before.forward_s, before.backward_s))


def alike() -> Profile:
    """Five workers of one kind, of which the first alone was measured."""
    profile = make_profile(work=[2e-3] * 6, slowness=[1.0] * 5, batch=8)
    return replace(
        profile,
        workers=tuple(replace(each, kind="box") for each in profile.workers),
        measurements=tuple(each for each in profile.measurements if each.worker == worker_name(0)),
    )


def test_like_workers_that_were_not_traced_get_what_holds_for_their_kind() -> None:
    """Two of five like workers are traced, 20 and 40 % too slow: the other three share 30 %, and no more figures."""
    profile = alike()
    plan = make_plan(profile, [(1, NAMES[:3]), (2, NAMES[3:6])], micro_batches=2)
    whole = tuple(replace(m, worker=worker.name) for worker in profile.workers for m in profile.measurements)
    truth = replace(profile, measurements=whole)
    truth = slower_worker(slower_worker(truth, 1, forward=1.2, backward=1.2), 2, forward=1.4, backward=1.4)
    new = corrected(profile, plan, run_in(truth, plan))
    cost, before = CostModel(new), CostModel(profile).partition("p0", worker_name(0), 4).forward_s
    ratios = [cost.partition("p0", worker_name(rank), 4).forward_s / before for rank in range(5)]
    assert ratios == pytest.approx([1.3, 1.2, 1.4, 1.3, 1.3])
    assert {each.worker for each in new.measurements} == {worker_name(rank) for rank in range(4)}


def on(device: str, profile: Profile, *, share: float = 0.0) -> Profile:
    """The profile with workers of such a device and allocator."""
    made = on_devices(profile, [device] * len(profile.workers))
    return replace(made, workers=tuple(replace(each, allocator_share=share) for each in made.workers))


@pytest.mark.parametrize("share", [0.0, 0.18])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_memory_is_corrected_upwards_only(device: str, share: float) -> None:
    """A worker that held 5 MB more than predicted is predicted to hold them; one that held less is left alone."""
    profile = on(device, PROFILE, share=share)
    plan = make_plan(profile, [(0, NAMES[:4]), (1, NAMES[4:8]), (2, NAMES[8:])], micro_batches=4)
    trace = run_in(profile, plan)
    held = [worker.peak_bytes for worker in trace.workers]
    trace = replace(
        trace,
        workers=tuple(
            replace(worker, peak_bytes=peak + more)
            for worker, peak, more in zip(trace.workers, held, (5e6, -5e6, 0), strict=True)
        ),
    )
    new = corrected(profile, plan, trace)
    now = [worker_memory(CostModel(new), plan, worker).total for worker in plan.workers]
    assert now == pytest.approx([held[0] + 5e6, held[1], held[2]])
    again = corrected(new, plan, trace)
    assert [each.allocator_share for each in again.workers] == [each.allocator_share for each in new.workers]
    workspaces = [[each.workspace_bytes for each in found.measurements] for found in (again, new)]
    assert workspaces[0] == pytest.approx(workspaces[1])


def beyond(profile: Profile, excess: float) -> tuple[Profile, float]:
    """Corrected by a run of workers 1 and 2 in which worker 1 held so much too much, and what it was to hold."""
    plan = make_plan(profile, [(1, NAMES[:3]), (2, NAMES[3:6])], micro_batches=2)
    trace = run_in(profile, plan)
    peak = trace.workers[0].peak_bytes
    first = replace(trace.workers[0], peak_bytes=peak + excess)
    return corrected(profile, plan, replace(trace, workers=(first, trace.workers[1]))), peak


def workspaces(profile: Profile) -> list[float]:
    return [CostModel(profile).partition("p0", worker.name, 4).workspace_bytes for worker in profile.workers]


def test_memory_of_like_gpus_is_corrected_by_the_largest_excess() -> None:
    """What one of two traced workers held too much is workspace, and expected of the like ones not traced."""
    new, _ = beyond(on("cuda:0", alike(), share=0.2), 3.6e6)
    assert workspaces(new) == pytest.approx([3e6, 3e6, 0, 3e6, 3e6])
    assert [each.allocator_share for each in new.workers] == [0.2] * 5


def test_a_heap_that_was_larger_than_predicted_raises_the_share_of_all_like_it() -> None:
    """On a CPU the excess is holes, which grow with what is held: other plans are predicted to have them too."""
    profile = on("cpu", alike(), share=0.1)
    new, peak = beyond(profile, 3e6)
    share = (peak + 3e6) / (peak / 1.1) - 1
    assert [each.allocator_share for each in new.workers] == pytest.approx([share, share, 0.1, share, share])
    assert workspaces(new) == [0] * 5
    other = make_plan(profile, [(3, NAMES[:6])], micro_batches=1)
    was, now = (worker_memory(CostModel(each), other, worker_name(3)).total for each in (profile, new))
    assert now == pytest.approx(was * (1 + share) / 1.1)
    text = f"calibrated: worker:1/cpu: allocator's share 10.0 -> {100 * share:.1f} %"
    assert any(text in warning for warning in new.warnings)


def test_what_no_heap_explains_is_workspace() -> None:
    """Beyond as much again as the tensors nothing is said of other plans: this one's peak is still met."""
    profile = on("cpu", alike(), share=0.1)
    plan = make_plan(profile, [(1, NAMES[:3]), (2, NAMES[3:6])], micro_batches=2)
    new, peak = beyond(profile, 3 * run_in(profile, plan).workers[0].peak_bytes)
    assert new.workers[1].allocator_share == 1.0
    assert worker_memory(CostModel(new), plan, worker_name(1)).total == pytest.approx(4 * peak)


def test_sizes_close_together_say_nothing_of_larger_ones() -> None:
    """Two sizes beyond the sweep, 2 % apart and off by noise: there they hold, beyond the link is its own, scaled."""
    link = PROFILE.links[0]
    said = {size: message_s(link.points, size) for size in (2e7, 2.04e7, 4e7, 1e9)}
    seen = {2e7: Samples((1.5 * said[2e7],)), 2.04e7: Samples((1.3 * said[2.04e7],))}
    new = corrected_link(link, seen)
    for size, factor in ((2e7, 1.5), (2.04e7, 1.3), (4e7, 1.3), (1e9, 1.3)):
        assert message_s(new.points, size) == pytest.approx(factor * said[size], rel=2e-3)
    again = corrected_link(new, seen)
    assert [point.bytes for point in again.points] == [point.bytes for point in new.points]


def test_points_of_a_link_follow_the_sizes_that_were_seen() -> None:
    """Two sizes seen, one twice and one four times as slow: exact there, between them in between, beyond them alike."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2, edges=[(0, 2), (1, 2)], bandwidth=1e8, batch=4)
    small, large = profile.edges
    profile = replace(profile, edges=(replace(small, bytes_per_sample=1e4), replace(large, bytes_per_sample=1e6)))
    plan = make_plan(profile, [(0, ["p0"]), (0, ["p1"]), (1, ["p2"])], micro_batches=4)
    plan = replace(plan, schedule="interleaved")
    there = (worker_name(0), worker_name(1))
    points = profile.links[0].points
    assert [point.bytes for point in points] == [1e3, 1e5, 1e7]
    truth = replace(
        profile,
        links=tuple(
            replace(
                link,
                points=tuple(
                    replace(point, seconds=(2 if point.bytes < 1e5 else 4) * point.seconds) for point in link.points
                ),
            )
            for link in profile.links
        ),
    )
    found = agree(plan, profile, run_in(truth, plan))
    new = calibrated(profile, found, trace="t")
    seen = {each.bytes: each.once for each in found.routes if (each.route.source, each.route.target) == there}
    assert seen[1e6].measured_s is not None
    link = next(each for each in new.links if (each.source, each.target) == there)
    sizes = [point.bytes for point in link.points]
    assert sizes == sorted({1e3, 1e5, 1e7} | {size for size, once in seen.items() if once.measured_s is not None})
    for size, once in seen.items():
        if once.measured_s is not None:
            assert CostModel(new).transfer_s(*there, size) == pytest.approx(CostModel(truth).transfer_s(*there, size))
    assert link.points[-1].seconds == pytest.approx(4 * points[-1].seconds, rel=0.01)


def test_collectives_are_scaled_as_their_links() -> None:
    """A link that a run found three times as slow slows the all-reduces over it, by whatever their ratio was."""
    pairs = [(worker_name(0), worker_name(1)), (worker_name(1), worker_name(2))]
    measured = tuple(Collective(pair, (LinkPoint(2e7, 0.5),), busy=0.4) for pair in pairs)
    profile = replace(PROFILE, collectives=measured)
    new = corrected(profile, PLAN, run_in(slower_link(profile, 0, 1, 3.0), PLAN))
    for pair, before, after in zip(pairs, measured, new.collectives, strict=True):
        ratio = CostModel(new).reduce_s(pair, 2e7) / CostModel(profile).reduce_s(pair, 2e7)
        assert ratio == pytest.approx(3.0 if pair == pairs[0] else 1.0, rel=0.01)
        assert after == replace(before, points=(replace(before.points[0], seconds=after.points[0].seconds),))
        assert after.points[0].seconds == pytest.approx(ratio * 0.5)


def test_warnings_are_those_of_the_new_figures() -> None:
    """Spreads are said anew, what was seen while measuring stays, and a line is there once."""
    points = tuple(replace(each, spread=0.5) for each in PROFILE.measurements[:1])
    profile = with_warnings(
        replace(PROFILE, measurements=(*points, *PROFILE.measurements[1:]), environment={"calibrated": 5}),
        ("links share a wire",),
    )
    profile = replace(profile, warnings=(*profile.warnings, "p9 on worker:9/cpu: seen by hand"))
    new = corrected(profile, PLAN, run_in(PROFILE, PLAN))
    assert "links share a wire" in new.warnings
    assert "p9 on worker:9/cpu: seen by hand" in new.warnings
    assert new.warnings == with_warnings(new, other_warnings(new)).warnings
    assert len(new.environment["calibrated"]) == 1


def test_the_file_says_what_was_done(tmp_path) -> None:
    """Warnings name the trace, the ratios and what could not be told; the environment keeps every figure."""
    truth = slower_link(slower_worker(PROFILE, 2, backward=1.2), 0, 1, 50.0)
    new = corrected(PROFILE, PLAN, run_in(truth, PLAN))
    save_profile(new, tmp_path / "new.json")
    assert load_profile(tmp_path / "new.json") == new
    text = "\n".join(new.warnings)
    assert "calibrated by trace.json: a step took" in text
    assert "calibrated: worker:2/cpu: backward 1.200x" in text
    assert "calibrated: link worker:0/cpu to worker:1/cpu: 50.000x at" in text
    (record,) = new.environment["calibrated"]
    assert record["workers"][worker_name(2)]["backward"] == pytest.approx(1.2)
    assert record["step_measured_s"] == pytest.approx(step_s(PLAN, CostModel(truth)))


def test_a_second_correction_changes_nothing_more() -> None:
    """Against a trace of the same run the corrected profile agrees, and is as it was."""
    trace = run_in(slower_worker(PROFILE, 2, forward=1.2, backward=1.2), PLAN)
    once = corrected(PROFILE, PLAN, trace)
    again = corrected(once, PLAN, trace)
    for mine, its in zip(once.measurements, again.measurements, strict=True):
        assert (mine.forward_s, mine.backward_s) == pytest.approx((its.forward_s, its.backward_s))
    assert len(again.environment["calibrated"]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_profile_run_solve_makes_a_plan_that_is_better_in_truth(seed: int) -> None:
    """Solve, run, correct, solve again: the second plan beats the first where the truth is another than the profile."""
    rng = random.Random(seed)
    profile = make_profile(
        work=[rng.uniform(1e-3, 4e-3) for _ in range(9)], slowness=[1.0, 1.0, 1.5], batch=8, bandwidth=1e9
    )
    slow = seed % 2
    truth = slower_worker(profile, slow, forward=2.0, backward=2.0)
    options = SolveOptions(schedule="gpipe")
    first = solve(profile, options).plan
    second = solve(corrected(profile, first, run_in(truth, first)), options).plan
    assert second.stages != first.stages
    assert predict(second, truth).step_s < 0.97 * predict(first, truth).step_s
    assert second.predicted.step_s == pytest.approx(predict(second, truth).step_s, rel=0.02)


@pytest.mark.parametrize("measured", [False, True])
def test_a_plan_with_shared_stages_corrects_its_workers_and_their_all_reduce(measured: bool) -> None:
    """A worker of the shared stage 30 % slower, all-reduces 2.5 times as long: the step is the true one again."""
    shared = replace(
        PLAN.stages[0], partitions=(*NAMES[:8],), sole_worker=None,
        replicas=(Replica(worker_name(0), 2), Replica(worker_name(1), 2)),
    )  # fmt: skip
    plan = replace(PLAN, schedule="1f1b", stages=(shared, PLAN.stages[2]))
    pair = (worker_name(0), worker_name(1))
    said = Collective(pair, (LinkPoint(1e3, 1e-4), LinkPoint(1e7, 0.1)))
    slow = replace(said, points=tuple(replace(each, seconds=2.5 * each.seconds) for each in said.points))
    profile = replace(PROFILE, collectives=(said,) if measured else ())
    truth = slower_worker(replace(PROFILE, collectives=(slow,)), 1, forward=1.3, backward=1.3)
    new = corrected(profile, plan, run_in(truth, plan))
    assert step_s(plan, CostModel(profile)) < 0.95 * step_s(plan, CostModel(truth))
    assert step_s(plan, CostModel(new)) == pytest.approx(step_s(plan, CostModel(truth)), rel=0.01)
    assert [frozenset(each.workers) for each in new.collectives] == [frozenset(pair)]
    assert any(line.startswith("calibrated: all-reduce of worker:0/cpu, worker:1/cpu:") for line in new.warnings)
    was, now = (cost.partition("p0", worker_name(1), 4) for cost in (CostModel(profile), CostModel(new)))
    assert now.forward_s == pytest.approx(1.3 * was.forward_s)
