"""What limits a plan, from its own prediction."""

from dataclasses import replace

from builders import make_plan, make_profile

from assigner.bottleneck import limiting
from assigner.simulate import predict


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
    link = said(profile, plan)
    assert link.startswith("the link from worker:") or "for messages and stands idle for" in link
    fast = replace(profile, links=make_profile(work=[1], slowness=[1, 1], bandwidth=1e12, latency=1e-7).links)
    assert "for its micro-batch), stands idle for 50 %; the next" in said(fast, plan)


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
    assert text.endswith("; to save memory 1 of 2 partitions run forward twice")
