"""Predicted and measured side by side, and where the difference comes from: what is put in comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_plan, make_profile, worker_name
from drawn_plans import drawn
from made_runs import run_in, slower_link, slower_worker, with_busy

from assigner.errors import FormatError
from assigner.formats.stage import Replica, Stage
from assigner.formats.trace import (
    Trace,
    TracedAction,
    TracedMessage,
    WorkerTrace,
    check_same_plan,
    load_trace,
    save_trace,
    unlike,
)
from assigner.samples import Samples
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.simulate import predict, simulated, step_s
from assigner.schedule.timing import Instead
from assigner.validation.comparison import agree, as_run, explain
from assigner.validation.observed import observe, rehearsed
from assigner.validation.steps import runs_by_plan

PROFILE = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=2e8, edge_bytes=2e5)
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (2, ["p3", "p4", "p5"])], micro_batches=8)
FIRST, SECOND, THIRD = (worker_name(rank) for rank in range(3))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(15))
def test_a_run_as_predicted_agrees(seed: int, schedule: str) -> None:
    """Every figure that is read from a rehearsed trace is the one that was predicted."""
    profile, plan = drawn(seed, schedule)
    found = agree(plan, profile, run_in(profile, plan))
    assert found.step.error == pytest.approx(0, abs=1e-12)
    for one in (*found.computes, *found.routes):
        assert one.once.measured_s is None or one.once.error == pytest.approx(0, abs=1e-9)
    assert all(each.once.measured_s is not None for each in found.computes)
    for worker in found.workers:
        assert worker.wait.measured_s == pytest.approx(worker.wait.predicted_s)
        assert worker.overhead.measured_s == pytest.approx(worker.overhead.predicted_s)
        assert worker.memory_error == 0
    why = found.explanation
    assert (why.compute_s, why.transfers_s, why.unexplained_s) == pytest.approx(
        (0, 0, 0), abs=2e-2 * found.step.predicted_s
    )


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_a_difference_that_the_model_can_say_is_explained_to_the_last_bit(seed: int) -> None:
    """A chain with a slow worker, a slow link and busier messages: nothing is left unexplained; the sum is whole."""
    profile, plan = drawn(seed, "1f1b")
    truth = with_busy(slower_link(slower_worker(profile, 1, forward=1.2, backward=1.1), 2, 3, 2.0), 0.2)
    found = agree(plan, profile, run_in(truth, plan))
    why, whole = found.explanation, found.step.measured_s - found.step.predicted_s
    moved = why.compute_s + why.transfers_s + why.overheads_s + why.handling_s + why.variation_s + why.unexplained_s
    assert moved == pytest.approx(whole, abs=1e-12)
    assert why.unexplained_s == pytest.approx(0, abs=1e-9)


def test_a_slow_backward_is_the_cause() -> None:
    """Only compute moves the step, all of it, and the first cause is that worker's backward."""
    found = agree(PLAN, PROFILE, run_in(slower_worker(PROFILE, 2, backward=1.25), PLAN))
    why, whole = found.explanation, found.step.measured_s - found.step.predicted_s
    assert whole > 0
    assert (why.compute_s, why.transfers_s, why.overheads_s, why.unexplained_s) == pytest.approx(
        (whole, 0, 0, 0), abs=1e-12
    )
    cause = why.causes[0]
    assert (cause.group, cause.what, cause.worker, cause.stage) == ("compute", "backward", THIRD, 2)
    assert cause.measured_s == pytest.approx(1.25 * cause.predicted_s)
    assert cause.step_s == pytest.approx(whole)
    slow = next(each for each in found.computes if (each.kind, each.stage) == ("backward", 2))
    assert slow.once.error == pytest.approx(1 / 1.25 - 1)
    assert slow.difference_s == pytest.approx(8 * 0.25 * slow.once.predicted_s)


def test_a_slow_link_is_the_cause() -> None:
    """Only messages move the step; the link's flights are seen, for its receiver waits."""
    truth = slower_link(PROFILE, 0, 1, 20.0)
    found = agree(PLAN, PROFILE, run_in(truth, PLAN))
    why, whole = found.explanation, found.step.measured_s - found.step.predicted_s
    assert (why.compute_s, why.transfers_s, why.overheads_s) == pytest.approx((0, whole, 0), abs=1e-12)
    assert (why.causes[0].group, why.causes[0].worker, why.causes[0].target) == ("transfers", FIRST, SECOND)
    slow = next(each for each in found.routes if (each.route.source, each.route.target) == (FIRST, SECOND))
    assert slow.once.measured_s == pytest.approx(20 * slow.once.predicted_s)
    assert slow.once.samples == slow.count * found.steps


def test_what_a_worker_loses_between_actions_is_overhead() -> None:
    """Busy ends that the profile knows nothing of are neither compute nor waits."""
    found = agree(PLAN, PROFILE, run_in(with_busy(PROFILE, 1.0), PLAN))
    why, whole = found.explanation, found.step.measured_s - found.step.predicted_s
    assert (why.compute_s, why.overheads_s, why.unexplained_s) == pytest.approx((0, whole, 0), abs=1e-12)
    assert why.causes[0].group == "overheads"
    assert all(each.overhead.predicted_s == 0 < each.overhead.measured_s for each in found.workers)


def test_messages_processor_time_is_named_where_actions_have_it() -> None:
    """Priced behind actions and taken within some it is no variation, but that messages then leave later.

    Where means are medians nobody took it.
    """
    profile = with_busy(PROFILE, 0.5)
    cost = CostModel(profile)
    said = observe(rehearsed(simulated(PLAN, cost), cost))
    nothing = {key: Samples((0.0,)) for key in said.behind}
    gone = replace(said, behind=nothing)
    why = explain(PLAN, cost, said, gone)
    assert why.overheads_s < 0
    assert (why.handling_s, why.variation_s) == pytest.approx((0, 0), abs=1e-12)
    within = {
        key: Samples((*(samples.median_s,) * 2, samples.median_s + 3 * said.behind[key].median_s))
        if key in said.behind
        else samples
        for key, samples in said.compute.items()
    }
    why = explain(PLAN, cost, said, replace(gone, compute=within))
    assert why.handling_s == pytest.approx(-why.overheads_s)
    assert 0 < why.variation_s < why.handling_s


def test_start_and_end_of_a_step_are_overhead() -> None:
    """A step that begins late on every worker, and whose loss comes late, is longer by both."""
    plain = run_in(PROFILE, PLAN, steps=1)
    late = replace(
        plain,
        workers=tuple(
            replace(
                worker,
                actions=tuple(
                    replace(each, end_s=each.end_s + 0.007)
                    if each.kind == "step"
                    else replace(each, start_s=each.start_s + 0.004, end_s=each.end_s + 0.004)
                    for each in worker.actions
                ),
            )
            for worker in plain.workers
        ),
    )
    found = agree(PLAN, PROFILE, late)
    assert found.step.measured_s - found.step.predicted_s == pytest.approx(0.007)
    assert found.explanation.overheads_s == pytest.approx(0.007)
    assert found.observed.lead[SECOND].median_s > found.observed.lead[FIRST].median_s - 1e-12
    assert found.observed.tail.median_s == pytest.approx(0.003)


def test_the_runs_rematerialisation_is_what_is_priced() -> None:
    """A trace made with every partition rematerialised, or none, is not held against the plan's own choice."""
    plan = replace(PLAN, stages=(replace(PLAN.stages[0], rematerialise=("p0",)), *PLAN.stages[1:]))
    for remat in ("always", "never"):
        trace = replace(run_in(PROFILE, plan), remat=remat)
        done = as_run(plan, trace)
        assert {len(stage.rematerialise) for stage in done.stages} == ({2, 1, 3} if remat == "always" else {0})
        trace = replace(run_in(PROFILE, done), stages=plan.stages, remat=remat)
        found = agree(plan, PROFILE, trace)
        assert found.step.error == pytest.approx(0, abs=1e-12)
        assert found.step.predicted_s == predict(done, PROFILE).step_s != predict(plan, PROFILE).step_s


def test_a_trace_of_another_plan_is_refused() -> None:
    """Plan and trace must agree, and every worker must have done something."""
    trace = run_in(PROFILE, PLAN)
    with pytest.raises(FormatError, match="another plan"):
        agree(replace(PLAN, schedule="1f1b"), PROFILE, trace)
    idle = replace(trace.workers[2], actions=tuple(each for each in trace.workers[2].actions if each.kind == "step"))
    with pytest.raises(FormatError, match="nothing of worker:2"):
        agree(PLAN, PROFILE, replace(trace, workers=(*trace.workers[:2], idle)))


def test_a_trace_without_the_forwards_of_a_stage_is_refused() -> None:
    """What it took was kept as it was predicted, and a profile corrected by the rest."""
    trace = run_in(PROFILE, PLAN)
    rest = tuple(each for each in trace.workers[1].actions if each.kind != "forward")
    workers = (trace.workers[0], replace(trace.workers[1], actions=rest), trace.workers[2])
    with pytest.raises(FormatError, match=r"the trace has no forward of stages\[1\]"):
        agree(PLAN, PROFILE, replace(trace, workers=workers))


def test_a_rehearsed_trace_is_a_sound_file(tmp_path) -> None:
    """It is written and read back as it was."""
    trace = run_in(PROFILE, PLAN)
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace


def _made(
    first: list[TracedAction], second: list[TracedAction], end: float, *, stages: tuple[Stage, ...] = ()
) -> Trace:
    """A trace of two workers, of one step that ends at `end`."""
    whole = TracedAction(0, "step", -1, -1, 0.0, end)
    return Trace(
        workload=PLAN.workload, stages=stages or PLAN.stages[:2], schedule="gpipe", micro_batches=8, micro_batch_size=1,
        steps=1,
        workers=(WorkerTrace(FIRST, (whole, *first), 0, 0), WorkerTrace(SECOND, (whole, *second), 0, 0)),
    )  # fmt: skip


def _sends(*handed: float) -> list[TracedAction]:
    message = TracedMessage("activation", "p1", 0, SECOND, 1e3)
    return [TracedAction(0, "send", 0, m, at, at + 0.1, message) for m, at in enumerate(handed)]


def _receives(*waits: tuple[float, float]) -> list[TracedAction]:
    message = TracedMessage("activation", "p1", 0, FIRST, 1e3)
    return [TracedAction(0, "receive", 1, m, start, end, message) for m, (start, end) in enumerate(waits)]


def test_a_flight_begins_when_the_link_is_free() -> None:
    """The second message, handed over while the first is on its way, sets out when that one is there."""
    found = observe(_made(_sends(0.0, 0.5), _receives((0.0, 2.0), (2.5, 4.0)), 5.0))
    ((route, flights),) = found.flights.items()
    assert flights.seconds == (2.0, 2.0)
    assert (route.source, route.target) == (FIRST, SECOND)


def test_a_message_that_nobody_waited_for_says_nothing() -> None:
    """Nor does the next one, unless it was handed over after the first was surely there."""
    unseen = (3.0, 3.0)
    assert observe(_made(_sends(0.0, 0.5), _receives(unseen, (3.5, 4.0)), 5.0)).flights == {}
    (flights,) = observe(_made(_sends(0.0, 3.2), _receives(unseen, (3.5, 4.0)), 5.0)).flights.values()
    assert flights.seconds == (pytest.approx(0.8),)


def test_a_wait_counts_from_the_end_of_what_the_device_still_does() -> None:
    """On a GPU the host waits for a message while the device computes: that is no wait of the worker's."""
    actions = [
        TracedAction(0, "forward", 1, 0, 0.0, 2.0),
        *_receives((0.5, 3.0)),
        TracedAction(0, "forward", 1, 1, 3.25, 5.0),
    ]
    found = observe(_made([TracedAction(0, "forward", 0, 0, 0.0, 1.0)], actions, 5.0))
    assert found.waits[SECOND].seconds == (1.0,)
    assert found.overheads[SECOND].seconds == (0.25,)
    assert found.before[ActionKind.FORWARD, 1, SECOND].seconds == (0.0, 0.25)


def test_a_reduction_takes_what_its_buckets_take() -> None:
    """Each counts from when all have begun it and the one before it was there: a backward between them is no part."""

    def sums(*spans: tuple[float, float]) -> list[TracedAction]:
        return [TracedAction(0, "reduce", 0, -1, start, end) for start, end in spans]

    shared = Stage(None, PLAN.stages[0].partitions, replicas=(Replica(FIRST, 4), Replica(SECOND, 4)))
    first, second = sums((1.0, 3.0), (2.5, 4.0), (6.0, 7.5)), sums((2.0, 3.0), (2.0, 4.5), (6.5, 7.0))
    seen = observe(_made(first, second, 8.0, stages=(shared,)))
    assert [seen.compute[ActionKind.REDUCE, 0, worker].seconds for worker in (FIRST, SECOND)] == [(3.0,), (3.0,)]


def test_the_fast_step_time_is_that_of_the_timeline_with_other_figures_too() -> None:
    """Replacing a figure in the plan's price equals changing it in the profile."""
    slow = slower_worker(PROFILE, 1, forward=1.5)
    seen = observe(run_in(slow, PLAN))
    figures = Instead(seconds={key: each.median_s for key, each in seen.compute.items()})
    assert step_s(PLAN, CostModel(PROFILE), instead=figures) == pytest.approx(step_s(PLAN, CostModel(slow)), abs=1e-12)


def test_a_trace_of_another_order_is_of_another_plan() -> None:
    """Two listed plans with the same stages are told apart by what their workers did."""
    plan = replace(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3", "p4", "p5"])], micro_batches=2))
    orders = {FIRST: "0F0 0F1 0B0 0B1", SECOND: "1F0 1B0 1F1 1B1"}
    one = replace(plan, schedule="listed", orders=orders)
    other = replace(one, orders={**orders, FIRST: "0F0 0F1 0B1 0B0", SECOND: "1F0 1F1 1B1 1B0"})
    trace = run_in(PROFILE, one)
    check_same_plan(trace, one)
    assert unlike(trace, other) == ["orders"]
    assert runs_by_plan([("one", one), ("other", other)], [("run", trace)]).keys() == {"one"}
    with pytest.raises(FormatError, match="differs from this one in its orders"):
        agree(other, PROFILE, trace)
