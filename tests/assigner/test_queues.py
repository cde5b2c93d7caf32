"""Messages that wait for a wire: each takes its link for its whole time, and the wire for a share of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile, worker_name
from drawn_plans import drawn, replicated, with_wires

from assigner.formats.profile import Profile, Wire, WireLink
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import critical_path, path_shares
from assigner.schedule.objective import objective_value, steady_s
from assigner.schedule.orders import order_of
from assigner.schedule.queues import Job, run_queues
from assigner.schedule.simulate import simulated, step_s
from assigner.schedule.timing import StepTimer

if TYPE_CHECKING:
    from assigner.formats.plan import Plan

DRAWN = [(seed, schedule) for seed in range(16) for schedule in ("gpipe", "1f1b", "interleaved")]


def drawn_plan(seed: int, schedule: str) -> tuple[Profile, Plan]:
    profile, plan = drawn(seed, schedule)
    return replicated(profile, plan, seed) if seed % 3 == 0 else (profile, plan)


def wire(*links: tuple[int, int], slower: float) -> Wire:
    return Wire(tuple(WireLink(worker_name(source), worker_name(target)) for source, target in links), slower)


def two_pairs(slower: float) -> tuple[Profile, Plan]:
    """Worker 0 hands a value to worker 1, worker 2 one to worker 3, at once: 10 ms each, behind 1 ms of forward."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0] * 4, edges=[(0, 1), (2, 3)], batch=1)
    links = tuple(
        replace(each, points=tuple(replace(point, seconds=1e-2) for point in each.points)) for each in profile.links
    )
    profile = replace(
        profile, links=links, edges=tuple(replace(edge, gradient=False) for edge in profile.edges),
        wires=(wire((0, 1), (2, 3), slower=slower),),
    )  # fmt: skip
    return profile, make_plan(profile, [(n, [f"p{n}"]) for n in range(4)], micro_batches=1)


@pytest.mark.parametrize(("slower", "second_ms"), [(1.0, 6), (1.6, 9), (2.0, 11), (2.3, 11)])
def test_two_messages_at_once_share_a_wire(slower: float, second_ms: float) -> None:
    """The wire passes both in `slower` times as long; never less than one after the other."""
    profile, plan = two_pairs(slower)
    starts = [event.start_s for event in simulated(plan, CostModel(profile)).events if event.action.route]
    assert starts == pytest.approx([1e-3, second_ms * 1e-3])


def test_a_message_that_waits_for_its_link_leaves_the_wire_to_others() -> None:
    """Two messages of one link and one of another, ready at once: the second of the one asks when its link is free."""
    there = [[-1.0] for _ in range(3)]
    sender = [(Job(1.0, (), 0.0, ((there[0], 0, 4.0, 2), (there[1], 0, 4.0, 2))), 0)]
    other = [(Job(1.5, (), 0.0, ((there[2], 1, 4.0, 2),)), 0)]
    assert run_queues([sender, other, []], shared={0: (0, 0.5), 1: (0, 0.5)}) == ([1, 1, 0], 1.5)
    assert [each[0] for each in there] == [5.0, 9.0, 7.0]


@pytest.mark.parametrize(("seed", "schedule"), DRAWN)
def test_a_wire_that_takes_nothing_changes_nothing(seed: int, schedule: str) -> None:
    """In the order of their ends jobs have the times that they have in one pass, to the last bit."""
    profile, plan = drawn_plan(seed, schedule)
    timer, found = StepTimer(plan, CostModel(profile)), []
    orders = [order_of(plan, worker) for worker in plan.workers]
    links = {link for queue in timer.queues(orders) for job, _ in queue for _, link, _, _ in job.sends}
    for shared in ({}, dict.fromkeys(links, (0, 0.0))):
        timer.prices.forget()
        log: list = []
        done = run_queues(timer.queues(orders), log, shared=shared)
        found.append((done, sorted(log)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("seed", "schedule"), DRAWN)
def test_a_wire_only_delays(seed: int, schedule: str) -> None:
    """With wires no plan is faster; `step_s` is the timeline's to the last bit; the critical path is all of it."""
    profile, plan = drawn_plan(seed, schedule)
    cost = CostModel(with_wires(profile, seed))
    timeline = simulated(plan, cost)
    assert step_s(plan, cost) == timeline.step_s
    assert step_s(plan, cost.apart) == step_s(plan, CostModel(profile)) <= timeline.step_s
    assert timeline.events[critical_path(timeline)[0]].start_s == 0.0
    if not plan.is_replicated:
        assert sum(path_shares(timeline).values()) == pytest.approx(1.0)


def test_a_wire_of_which_a_plan_uses_one_link_is_that_links_own() -> None:
    """However much slower the others make it."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 3, bandwidth=1e7)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1", "p2"])], micro_batches=8)
    shared = replace(profile, wires=(wire((0, 1), (1, 2), slower=3.0),))
    assert simulated(plan, CostModel(shared)) == simulated(plan, CostModel(profile))


def test_the_steady_state_is_that_of_the_wire() -> None:
    """Two links of 10 ms a micro-batch each, at once 1.6 times as slow: 16 ms."""
    profile, plan = two_pairs(1.6)
    cost = CostModel(profile)
    assert steady_s(plan, cost.apart) == pytest.approx(1e-2)
    assert objective_value(plan, "throughput", cost, step_s=0.0) == pytest.approx(1.6e-2 * plan.micro_batches)
