"""What a plan tells about sharing stages among workers."""

from __future__ import annotations

from dataclasses import replace

from builders import make_plan, make_profile, worker_name

from assigner.formats.stage import Replica
from assigner.report.sharing import sharing
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2], parameters=4e6, bandwidth=1e8)


def told(plan, profile=PROFILE):
    """The sentences, of the plan as it is priced."""
    return [line.text for line in sharing(priced(plan, profile), profile)]


def test_a_plan_without_sharing_says_what_data_parallelism_would_add_up():
    """All gradients, over the slowest link of the ring, beside the plan's own step."""
    (text,) = told(make_plan(PROFILE, [(0, ["p0", "p1", "p2"]), (1, ["p3"])]))
    seconds = CostModel(PROFILE).reduce_s((worker_name(0), worker_name(1)), 1.6e7)
    assert text.startswith("data parallelism over all 2 workers, which this plan does not use: adding up 15.3 MiB of")
    assert f"takes {1000 * seconds:.0f} ms a step" in text
    assert text.endswith("of this plan's")


def test_a_shared_stage_says_what_it_adds_up_and_what_it_saves():
    """Its own gradients, and what its fastest worker would compute alone: 8 samples of 3 x 2 ms."""
    plan = make_plan(PROFILE, [(0, PROFILE.order)])
    shared = (Replica(worker_name(0), 3), Replica(worker_name(1), 1))
    plan = replace(plan, stages=(replace(plan.stages[0], sole_worker=None, replicas=shared),))
    (text,) = told(plan)
    assert text.startswith("stage 0 is shared by 2 workers: adding up 15.3 MiB of gradients, over the link from ")
    assert text.endswith("its forwards and backwards would take the fastest of them alone 96.0 ms")


def test_nothing_is_said_where_there_is_nothing_to_share():
    """One worker, another objective than the step, or no profile at hand."""
    alone = make_profile(work=[1e-3] * 2, slowness=[1])
    assert told(make_plan(alone, [(0, alone.order)]), alone) == []
    plan = priced(make_plan(PROFILE, [(0, PROFILE.order)]), PROFILE)
    assert sharing(plan, None) == ()
    assert sharing(replace(plan, objective="throughput"), PROFILE) == ()


def test_a_missing_link_is_named():
    """Two workers that cannot talk cannot add up anything."""
    apart = make_profile(work=[1e-3] * 2, slowness=[1, 1], links=False)
    (text,) = told(make_plan(apart, [(0, apart.order)]), apart)
    assert text.startswith("data parallelism over all workers is not possible: an all-reduce among ")
