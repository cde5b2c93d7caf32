"""Interleaved 1F1B: torch's own order where that is defined, and an order that runs everywhere else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops, _get_warmup_ops

from assigner.formats.stage import Replica, Stage
from assigner.schedule.orders import LETTERS, ActionKind, in_flight, interleaved_orders, listed, order_of
from assigner.schedule.simulate import predict
from tests.builders import make_plan, make_profile, worker_name


def of_torch(rank: int, workers: int, local: int, micro_batches: int) -> list[str]:
    """`ScheduleInterleaved1F1B._calculate_single_rank_operations`, without a process group."""
    per_round = micro_batches // max(1, micro_batches // workers)
    warm_up = _get_warmup_ops(rank, local, per_round, workers, micro_batches, multiply_factor=2)
    both = local * micro_batches - warm_up
    actions = _get_1f1b_rank_ops(
        local, workers, warm_up, both, local * micro_batches - both, rank,
        lambda step: (step // per_round) % local * workers + rank,
        lambda step: (local - 1 - (step - warm_up) // per_round % local) * workers + rank,
    )  # fmt: skip
    return [str(action) for action in actions if action is not None]


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 3])
def test_stages_dealt_out_in_turn_have_the_order_of_torch(workers: int, local: int):
    for micro_batches in (m for m in range(1, 17) if m % max(1, m // workers) == 0):
        takers = tuple((worker_name(s % workers),) * micro_batches for s in range(workers * local))
        found = interleaved_orders(takers)
        for rank in range(workers):
            mine = [f"{s}{LETTERS[kind]}{m}" for kind, s, m in found[worker_name(rank)]]
            assert mine == of_torch(rank, workers, local, micro_batches)


@pytest.mark.parametrize("seed", range(40))
def test_any_placement_has_an_order_that_is_sound_and_runs(seed: int):
    """Written out as a list it goes through the checks of lists."""
    rng = random.Random(seed)
    count, ranks, micro_batches = rng.randint(1, 7), rng.randint(1, 4), rng.choice([1, 2, 3, 5, 8])
    profile = make_profile(work=[1e-3] * count, slowness=[1.0] * 4, batch=micro_batches)
    plan = make_plan(profile, [(rng.randrange(ranks), [f"p{n}"]) for n in range(count)], micro_batches=micro_batches)
    if rng.random() < 0.4 and micro_batches > 1:
        shared = Stage(None, ("p0",), replicas=(Replica(worker_name(0), 1), Replica(worker_name(3), micro_batches - 1)))
        plan = replace(plan, stages=(shared, *plan.stages[1:]))
    plan = replace(plan, schedule="interleaved-1f1b")
    assert predict(listed(plan), profile) == predict(plan, profile)


def test_a_replica_that_is_left_without_a_micro_batch_has_an_empty_order():
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0] * 3, batch=4)
    plan = replace(make_plan(profile, [(0, ["p0"]), (0, ["p1"])]), schedule="interleaved-1f1b")
    three = tuple(Replica(worker_name(n), share) for n, share in enumerate((2, 1, 1)))
    plan = replace(plan, stages=(Stage(None, ("p0",), replicas=three), plan.stages[1])).cut(1, 1, batch_size=1)
    assert order_of(plan, worker_name(2)) == [(ActionKind.REDUCE, 0, -1)]


def test_it_keeps_fewer_micro_batches_than_the_breadth_first_schedule():
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0] * 2, batch=16)
    stages = [(0, ["p0"]), (1, ["p1"]), (0, ["p2"]), (1, ["p3"])]
    broad = replace(make_plan(profile, stages, micro_batches=16), schedule="interleaved")
    deep = replace(broad, schedule="interleaved-1f1b")
    assert in_flight(broad, 0, worker_name(0)) == 16
    assert in_flight(deep, 0, worker_name(0)) <= 5
    assert predict(deep, profile).step_s == pytest.approx(predict(broad, profile).step_s, rel=0.1)
