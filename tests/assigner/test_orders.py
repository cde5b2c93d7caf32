"""Orders that a plan lists: their notation, what makes them sound, and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from assigner.errors import FormatError
from assigner.formats.document import decode, encode
from assigner.formats.orders import ListedStep, parse_order, written_order
from assigner.formats.plan import Plan
from assigner.formats.stage import Replica, Stage
from assigner.report.placementchanges import changed_settings, same
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import ActionKind, in_flight, listed, order_of, warm_up
from assigner.schedule.program import build_program
from assigner.schedule.replication import takers
from assigner.schedule.simulate import predict, step_s
from tests.builders import make_plan, make_profile, worker_name

PROFILE = make_profile(work=[1e-3, 2e-3, 3e-3, 1e-3], slowness=[1, 2])
LOOP = make_plan(PROFILE, [(0, ["p0"]), (1, ["p1"]), (0, ["p2"]), (1, ["p3"])], micro_batches=2)
FIRST, SECOND = worker_name(0), worker_name(1)
ORDERS = {FIRST: "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", SECOND: "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"}


def of(orders: dict[str, str], plan: Plan = LOOP) -> Plan:
    return replace(plan, schedule="listed", orders=orders)


def test_an_order_reads_as_it_is_written():
    steps = (ListedStep(0, "F", 0), ListedStep(12, "I", 3), ListedStep(12, "W", 3))
    assert written_order(steps) == "0F0 12I3 12W3"
    assert parse_order("0F0 12I3  12W3\n", "orders") == steps


def test_a_plan_with_orders_is_read_as_it_was_written_and_is_of_format_2():
    plan = of(ORDERS)
    document = json.loads(json.dumps(encode(plan)))
    assert document["format_version"] == "2.0"
    assert document["orders"] == ORDERS
    assert decode(Plan, document) == plan
    assert "orders" not in encode(LOOP)
    assert len({plan, of(ORDERS), LOOP}) == 2


def test_the_orders_of_a_rule_written_out_cost_what_the_rule_costs():
    for plan in (LOOP, replace(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), schedule="1f1b")):
        assert predict(listed(plan), PROFILE) == predict(plan, PROFILE)
        assert step_s(listed(plan), CostModel(PROFILE)) == step_s(plan, CostModel(PROFILE))


def test_memory_is_counted_from_the_order():
    plan = of(ORDERS)
    assert [in_flight(plan, n, stage.worker) for n, stage in enumerate(plan.stages)] == [2, 2, 2, 1]
    assert [warm_up(plan, n) for n in range(4)] == [2, 2, 2, 1]
    shallow, deep = (predict(each, PROFILE).workers[1].memory.activations for each in (plan, LOOP))
    assert shallow < deep


def test_halves_of_a_backward_send_behind_the_input_half():
    plan = of(ORDERS | {SECOND: "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1B0 3W1 1I1 1W1"})
    actions = build_program(plan, PROFILE.edges).actions[SECOND]
    sent = [before.kind for before, after in pairwise(actions) if after.kind is ActionKind.SEND]
    assert ActionKind.BACKWARD_INPUT in sent
    assert ActionKind.BACKWARD_WEIGHT not in sent
    assert in_flight(plan, 3, SECOND) == 2  # until its weight half


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("1F0 nonsense", "nonsense"),
        ("1F0 1A0", "1A0"),
        ("1F0 1F0", "1F0 stands twice"),
        ("1F0 1F1 3F0 3F1 3B0 3B1 1B0", "1B1 is missing"),
        ("1F0 1B0 3F0 3B0", "1F1 is in none"),
        ("1B0", "1B0 stands without 1F0"),
        ("1F0 1W0", "1W0 stands without 1I0"),
        ("1F0 1I0 1B0", "1B0 and 1I0 are the same backward"),
        ("1F0 1I0", "1W0 is missing"),
        ("0F0", "stage 0 is on worker:0/cpu"),
        ("1F2", "1F2 is not allowed"),
        ("4F0", "4F0 is not allowed"),
        ("1F1 1F0", "1F0 stands behind 1F1"),
        ("1F0 " * 25, "25 steps; the plan has no more than 24 in all"),
    ],
)
def test_an_order_that_is_not_sound_is_refused_with_the_step(order: str, said: str):
    with pytest.raises(FormatError) as caught:
        of(ORDERS | {SECOND: order})
    assert said in caught.value.message
    assert SECOND in caught.value.message or "is in none" in said


def test_workers_without_an_order_and_orders_without_a_worker_are_refused():
    with pytest.raises(FormatError, match="holds a stage and has no order"):
        of({FIRST: ORDERS[FIRST]})
    with pytest.raises(FormatError, match="'worker:7/cpu' holds no stage"):
        of(ORDERS | {worker_name(7): "0F0"})
    with pytest.raises(FormatError, match="schedule gpipe has its own"):
        replace(LOOP, orders=ORDERS)


def test_a_circle_between_workers_is_named():
    orders = {FIRST: "0F0 0F1 2F0 2F1 2B1 0B1 2B0 0B0", SECOND: "1F0 1F1 3F0 3F1 3B0 1B0 3B1 1B1"}
    with pytest.raises(FormatError) as caught:
        build_program(of(orders), PROFILE.edges)
    assert "worker:0/cpu waits at 2B1 for 3B1 of worker:1/cpu" in caught.value.message
    assert "worker:1/cpu waits at 1B0 for 2B0 of worker:0/cpu" in caught.value.message


def test_an_order_that_turns_the_model_round_on_one_worker_is_refused():
    plan = make_plan(PROFILE, [(0, ["p0"]), (0, ["p1"]), (0, ["p2"]), (0, ["p3"])], micro_batches=1)
    with pytest.raises(FormatError, match="waits at 0B0 for 1B0 later in its own order"):
        step_s(of({FIRST: "0F0 1F0 2F0 3F0 3B0 2B0 0B0 1B0"}, plan), CostModel(PROFILE))


def test_the_order_says_which_replica_takes_a_micro_batch():
    both = Stage(None, ("p0", "p1"), replicas=(Replica(FIRST, 1), Replica(SECOND, 1)))
    plan = replace(LOOP, stages=(both, Stage(SECOND, ("p2", "p3"))))
    orders = {FIRST: "0F1 0B1", SECOND: "0F0 1F0 1B0 1F1 1B1 0B0"}
    turned = of(orders, plan)
    assert takers(turned, 0) == (SECOND, FIRST)
    assert order_of(turned, FIRST)[-1] == (ActionKind.REDUCE, 0, -1)
    with pytest.raises(FormatError, match="its replica takes 1"):
        of({FIRST: "0F0 0F1 0B0 0B1", SECOND: "1F0 1B0 1F1 1B1"}, plan)


def test_workers_of_a_stage_may_together_take_in_more_than_the_stage_before_it():
    """No rule of depths holds for lists: who waits for whom says whether they run."""
    both = Stage(None, ("p1", "p2", "p3"), replicas=(Replica(SECOND, 2), Replica(FIRST, 1)))
    plan = replace(LOOP, micro_batches=3, micro_batch_size=3, stages=(Stage(FIRST, ("p0",)), both))
    listing = of({FIRST: "0F0 0F1 0B0 1F2 1B2 0F2 0B1 0B2", SECOND: "1F0 1B0 1F1 1B1"}, plan)
    with pytest.raises(FormatError, match="worker:0/cpu waits at 1F2 for 0F2 later in its own order"):
        build_program(listing, PROFILE.edges)
    listing = of({FIRST: "0F0 0F1 0B0 0B1 0F2 1F2 1B2 0B2", SECOND: "1F0 1F1 1B0 1B1"}, plan)
    assert [warm_up(listing, n) for n in range(2)] == [2, 3]
    build_program(listing, PROFILE.edges)


def test_fewer_micro_batches_keep_what_is_left_of_the_order():
    cut = of(ORDERS).cut(1, 8, batch_size=8)
    assert cut.orders == {FIRST: "0F0 2F0 2B0 0B0", SECOND: "1F0 3F0 3B0 1B0"}
    build_program(cut, PROFILE.edges)


def test_stages_of_a_worker_that_need_not_wait_for_each_other_may_take_turns():
    """p1 and p2 read p0's value, which comes before the first of them; its gradient leaves behind the last."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1, 1], edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    stages = [(0, ["p0"]), (1, ["p1"]), (1, ["p2"]), (0, ["p3"])]
    plan = of(
        {FIRST: "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1", SECOND: "1F0 2F0 2F1 1F1 1B0 2B0 2B1 1B1"},
        make_plan(profile, stages, micro_batches=2),
    )
    program = build_program(plan, profile.edges)
    kinds = [(each.kind.value, each.stage, each.micro_batch) for each in program.actions[SECOND]]
    assert kinds[kinds.index(("forward", 2, 1)) - 1] == ("receive", 2, 1)
    assert kinds[kinds.index(("forward", 1, 0)) - 1] == ("receive", 1, 0)
    assert ("send", 2, 0) in kinds[kinds.index(("backward", 2, 0)) :]
    assert ("send", 1, 1) in kinds[kinds.index(("backward", 1, 1)) :]
    assert step_s(plan, CostModel(profile)) == predict(plan, profile).step_s


def test_1f1b_with_several_stages_a_worker_is_no_plan():
    """It is refused when the plan is read, and not only when it is run: other schedules have such plans."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0] * 2)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (0, ["p2"])])
    assert replace(plan, schedule="interleaved").held["worker:0/cpu"] == (0, 2)
    with pytest.raises(FormatError, match="schedule 1f1b: worker:0/cpu holds 2 stages"):
        replace(plan, schedule="1f1b")


def test_plans_that_differ_in_their_orders_alone_are_not_the_same():
    swapped = ORDERS | {FIRST: "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1"}
    assert same(of(ORDERS), of(dict(ORDERS)))
    assert not same(of(ORDERS), of(swapped))
    assert set(changed_settings(of(ORDERS), of(swapped))) == {"orders"}
