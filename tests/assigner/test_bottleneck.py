"""What limits a plan, from its own prediction."""

import re
from dataclasses import replace

import pytest
from builders import make_plan, make_profile
from drawn_plans import drawn

from assigner import formatting
from assigner.formats.solverreport import SolverReport
from assigner.report.page.sections import critical_sheet
from assigner.schedule.bottleneck import limiting
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import path_shares
from assigner.schedule.objective import steady_s
from assigner.schedule.simulate import predict, simulated
from assigner.solver import SolveOptions, solve


def said(profile, plan):
    return limiting(plan, predict(plan, profile))


def test_the_busiest_worker_with_its_share_and_the_next_one():
    """Worker 1 takes three times as long for its half: 24 ms a micro-batch."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 3])
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=8)
    text = said(profile, plan)
    assert text.startswith("worker:1/cpu limits the plan: it computes for 9")
    assert "(18.0 ms for each of 8 micro-batches)" in text
    assert "; the next, worker:0/cpu, for 3" in text


def test_a_worker_that_waits_says_for_what():
    """With one micro-batch even the busiest worker stands idle, or waits for messages on a slow link."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 1], bandwidth=2e7)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=1)
    slow = replace(profile, links=make_profile(work=[1], slowness=[1, 1], bandwidth=2e8).links)
    assert "and stands idle for 54 %, 8 % of the step while messages are on their way; the next" in said(slow, plan)
    fast = replace(profile, links=make_profile(work=[1], slowness=[1, 1], bandwidth=1e12, latency=1e-7).links)
    assert "for its micro-batch) and stands idle for 50 %; the next" in said(fast, plan)


def test_a_busy_link_and_what_the_workers_do():
    """Where messages take longer than work the link is named, with the busiest worker's share."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1, 1], bandwidth=2e7)
    text = said(profile, make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=8))
    assert text.startswith("the link from worker:")
    assert "and the busiest worker, worker:" in text


def test_a_single_worker_and_remat():
    """One worker has no next; partitions that run twice are counted."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1])
    plan = make_plan(profile, [(0, ["p0", "p1"])])
    plan = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p1",)),))
    text = said(profile, plan)
    assert "computes for 100 % of the step" in text
    assert "the next" not in text
    assert text.endswith("; 1 of 2 partitions run forward twice (rematerialised)")


def test_messages_that_keep_a_worker_busy_count():
    """A worker that computes less than another, and handles messages for most of the step, is what limits."""
    profile = make_profile(work=[2e-3] * 3, slowness=[2, 1, 1], bandwidth=3e8, edge_bytes=1e6, busy=0.9)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])], micro_batches=8)
    text = said(profile, plan)
    worker = {each.worker: each for each in predict(plan, profile).workers}["worker:1/cpu"]
    assert worker.compute_s < worker.busy_s
    assert text.startswith("worker:1/cpu limits the plan: it computes for 2")
    assert ", is kept busy by messages for 5" in text
    assert "; the next, worker:0/cpu, is occupied for " in text


def test_shares_of_busy_and_idle_add_up():
    """Computing, busy with messages and idle are the whole step, to the rounding of three shares."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 1], bandwidth=2e8, edge_bytes=1e6, busy=0.2)
    text = said(profile, make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=2))
    assert ", is kept busy by messages for " in text
    shares = [int(each) for each in re.findall(r"(\d+) %", text.partition(";")[0])]
    assert len(shares) == 3
    assert abs(sum(shares) - 100) <= 2


def test_a_prediction_that_does_not_tell_of_messages():
    """Files of before: what messages take of a worker is not known, and only computing counts."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 3], busy=0.3)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=8)
    told = predict(plan, profile)
    old = replace(told, workers=tuple(replace(w, busy_s=None, forward_s=None, update_s=None) for w in told.workers))
    assert limiting(plan, old).startswith("worker:1/cpu limits the plan: it computes for 9")
    assert "busy" not in limiting(plan, old)
    assert limiting(replace(plan, objective="latency"), old) == limiting(plan, old)


@pytest.mark.parametrize("bandwidth", [1e9, 3e6])
def test_throughput_is_explained_by_the_steady_state(bandwidth):
    """The slowest worker or link takes, for each batch, what the plan's objective is."""
    profile = make_profile(work=[2e-3] * 4, slowness=[1, 2, 3], bandwidth=bandwidth, busy=0.1)
    solved = solve(profile, SolveOptions(objective="throughput", micro_batches=4)).plan
    pinned = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    price = pinned.micro_batches * steady_s(pinned, CostModel(profile))
    for plan, value in ((solved, solved.solver.objective_s), (replace(pinned, objective="throughput"), price)):
        text = said(profile, plan)
        assert f"once the pipeline is full it is never idle, {formatting.seconds(value)} for each batch" in text
        assert "of the step" not in text
    assert said(profile, replace(pinned, objective="throughput")).startswith(
        "worker:1/cpu limits" if bandwidth == 1e9 else "the link from worker:"
    )


def test_messages_of_tied_parameters_are_no_part_of_the_steady_state():
    """A link that carries a large tied parameter once a step is not what limits the throughput."""
    profile = make_profile(work=[2e-3] * 4, slowness=[1, 2], bandwidth=1e8)
    plan = replace(make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), objective="throughput")
    value = plan.micro_batches * steady_s(plan, CostModel(profile))
    told = predict(plan, profile)
    tied = replace(told, transfers=tuple(replace(each, seconds=100 * each.seconds) for each in told.transfers))
    assert limiting(plan, tied).startswith("the link from")
    known = replace(plan, solver=SolverReport("HiGHS", "1", "optimal", value, value, 0.0, 0.1))
    assert limiting(known, tied).startswith("worker:1/cpu limits the plan")


def test_latency_is_explained_by_one_forward():
    """Backward and updates play no part, nor do gradients on the way back."""
    profile = make_profile(work=[2e-3] * 4, slowness=[1, 2], bandwidth=1e8)
    alone = replace(make_plan(profile, [(0, ["p0", "p1", "p2", "p3"])]), objective="latency")
    assert said(profile, alone) == "worker:0/cpu limits the plan: it runs the whole forward, 16.0 ms a micro-batch"
    both = replace(make_plan(profile, [(1, ["p0", "p1"]), (0, ["p2", "p3"])]), objective="latency")
    assert said(profile, both) == (
        "worker:1/cpu limits the plan: 16.0 ms of one forward are spent on it; next come 8.00 ms on worker:0/cpu"
    )
    thin = replace(profile, links=make_profile(work=[1], slowness=[1, 1], bandwidth=1e7, latency=1e-6).links)
    assert said(thin, both).startswith("the link from worker:1/cpu to worker:0/cpu limits the plan: 20.0 ms of one")


def late_link(profile, source, factor):
    """The links from one worker take so many times as long."""
    return replace(
        profile,
        links=tuple(
            replace(link, points=tuple(replace(point, seconds=factor * point.seconds) for point in link.points))
            if link.source == source
            else link
            for link in profile.links
        ),
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_limits_a_plan_is_where_its_critical_path_is(seed, schedule):
    """The sentence names the worker or link that the path is on for longest, and the path's table has it first."""
    profile, plan = drawn(seed, schedule)
    timeline = simulated(plan, CostModel(profile))
    shares = path_shares(timeline)
    assert sum(shares.values()) == pytest.approx(1)
    text = limiting(plan, predict(plan, profile), shares)
    most = max(shares.values())
    named = {" -> ".join(where) for where, share in shares.items() if share > most - 0.01}
    name = text.partition(" limits the plan")[0]
    assert name.removeprefix("the link from ").replace(" to ", " -> ") in named
    assert critical_sheet(timeline).rows[0][1] in named


def test_the_busiest_worker_is_told_beside_what_limits():
    """One micro-batch over a slow wire: the path is on the wire for longest, the second worker computes for longest."""
    profile = make_profile(work=[2e-3] * 2, slowness=[1, 1.2], bandwidth=1e8)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=1)
    slow = late_link(profile, "worker:0/cpu", 40.0)
    shares = path_shares(simulated(plan, CostModel(slow)))
    assert max(shares, key=shares.get) == ("worker:0/cpu", "worker:1/cpu")
    prediction = replace(predict(plan, slow), transfers=())
    text = limiting(plan, prediction, shares)
    assert text.startswith("the link from worker:0/cpu to worker:1/cpu limits the plan: the critical path is on it")
    assert "; the busiest, worker:1/cpu, computes for " in text
