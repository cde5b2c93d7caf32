"""What the workers of a stage rematerialise is one set: chosen for all of them, as enumeration says."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_profile
from shared_placements import best_shared
from sweeps import sweep

from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict, step_s
from assigner.solver import SolveOptions, solve
from assigner.solver.limits import tuning

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

ROUNDING = 1e-6


def unlike(profile: Profile, forwards, *, room: float) -> Profile:
    """The profile with other forwards, and memory on each worker for so much of a batch's activations, and for state.

    Updates take no time, so that dividing them saves none.

    Args:
        profile: The instance.
        forwards: From the numbers of a worker and a partition to how many times as long its forward takes there.
        room: A share of the activations of all samples.
    """
    number = {worker.name: n for n, worker in enumerate(profile.workers)}
    measured = tuple(
        replace(
            each,
            forward_s=each.forward_s * forwards(number[each.worker], profile.order.index(each.partition)),
            update_s=0.0,
        )
        for each in profile.measurements
    )
    state = 4 * sum(each.parameter_bytes for each in profile.partitions)
    kept = profile.workload.batch_size * sum(
        each.activation_bytes for each in measured if each.worker == profile.workers[0].name and each.micro_batch == 1
    )
    workers = tuple(replace(each, memory_bytes=2 * state + room * kept) for each in profile.workers)
    return replace(profile, measurements=measured, workers=workers)


def crafted(partitions: int, workers: int, *, batch: int, room: float, spread: float = 1.05) -> Profile:
    """Each worker has the shorter forward of other partitions, and all want to rematerialise these."""
    profile = make_profile(
        work=[1.0] * partitions, slowness=[1.0] * workers, parameters=1e3, edge_bytes=1e3, batch=batch
    )  # fmt: skip
    return unlike(profile, lambda w, i: 1.0 if i * workers // partitions == w else spread, room=room)


def drawn(seed: int) -> Profile:
    """Two or three workers, tight, that take each other's time for each partition; their links cost little."""
    rng = random.Random(seed)
    partitions, workers = rng.choice([(2, 2), (3, 2), (4, 2), (3, 3)])
    factors = [[rng.uniform(0.5, 2.0) for _ in range(partitions)] for _ in range(workers)]
    profile = make_profile(
        work=[rng.uniform(0.5, 1.5) for _ in range(partitions)], slowness=[1.0] * workers, parameters=1e3,
        edge_bytes=1e3, batch=rng.choice([2, 3, 4]),
    )  # fmt: skip
    sizes = {name: rng.choice([0.5, 1.0, rng.uniform(0.5, 2.0)]) for name in profile.order}
    measured = tuple(
        replace(each, activation_bytes=each.activation_bytes * sizes[each.partition]) for each in profile.measurements
    )
    return unlike(replace(profile, measurements=measured), lambda w, i: factors[w][i], room=rng.uniform(0.25, 0.6))


def with_set(plan, again):
    """A plan of one stage that rematerialises these."""
    return replace(plan, stages=(replace(plan.stages[0], rematerialise=again),))


def subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, number) for number in range(len(names) + 1))


@pytest.mark.parametrize(
    ("partitions", "workers", "batch", "room"), [(6, 3, 3, 0.29), (4, 2, 4, 0.2), (6, 2, 4, 0.2), (6, 3, 6, 0.15)]
)  # fmt: skip
def test_one_set_suits_all_workers(partitions, workers, batch, room):
    """No other set that fits makes the plan faster, and none takes less than the bound."""
    profile = crafted(partitions, workers, batch=batch, room=room)
    plan = solve(profile, SolveOptions(schedule="one-stage", gap=0, together=(profile.order,))).plan
    assert len(plan.stages[0].workers) == workers
    assert 0 < len(plan.stages[0].rematerialise) < partitions
    cost = CostModel(profile)
    tried = [with_set(plan, again) for again in subsets(profile.order)]
    least = min(step_s(each, cost) for each in tried if not overfull(predict(each, profile)))
    assert plan.solver.bound_s <= least * (1 + ROUNDING)
    assert plan.solver.objective_s == pytest.approx(least, rel=ROUNDING)
    assert plan.solver.status == "optimal"


@pytest.mark.parametrize("seed", sweep(range(40), quick=7))
def test_no_plan_of_any_sets_is_faster(seed):
    """Over all cuts, sets of workers, shares, warm-up depths and remat subsets."""
    profile = drawn(seed)
    found = solve(profile, SolveOptions(schedule="one-stage", gap=0)).plan
    best = best_shared(profile, remat=True)
    assert best is not None
    least, _ = best
    assert found.is_divided or found.solver.objective_s == pytest.approx(least, rel=ROUNDING)
    assert found.solver.bound_s <= least * (1 + ROUNDING)
    assert not overfull(found.predicted)


@pytest.mark.parametrize("seed", range(3))
def test_of_many_partitions_no_name_can_be_dropped(seed, monkeypatch):
    """Where the sets are too many to look at each, the plan fits, and with any name less it does not."""
    monkeypatch.setattr(tuning, "REMAT_SETS", 1)
    rng = random.Random(seed)
    factors = [[rng.uniform(0.9, 1.1) for _ in range(12)] for _ in range(3)]
    profile = make_profile(work=[1.0] * 12, slowness=[1.0] * 3, parameters=1e3, edge_bytes=1e3, batch=3)
    profile = unlike(profile, lambda w, i: factors[w][i], room=0.2)
    plan = solve(profile, SolveOptions(schedule="one-stage", together=(profile.order,))).plan
    stage = plan.stages[0]
    assert stage.replicas
    assert stage.rematerialise
    assert not overfull(plan.predicted)
    for dropped in stage.rematerialise:
        less = tuple(name for name in stage.rematerialise if name != dropped)
        assert overfull(predict(with_set(plan, less), profile))
