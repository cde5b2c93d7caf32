"""Of chains the solver's plan is the best there is: exhaustive search says so."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_profile, random_chain, single
from sweeps import sweep

from assigner.errors import InfeasibleError
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve

EXACT = 1e-6


def draw(seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    return {
        "partitions": rng.choice([3, 4, 5]), "workers": rng.choice([2, 3, 4]), "busy": rng.random() < 0.5,
        "tight": rng.random() < 0.5, "missing": rng.choice([0, 0, 0.3]), "pins": rng.random() < 0.3,
        "late_updates": rng.random() < 0.4, "alike": rng.random() < 0.3,
    }  # fmt: skip


def check_against_brute_force(seed: int, options: SolveOptions) -> None:
    profile = random_instance(seed, **draw(seed))
    best = best_plan(profile, remat=options.remat)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(profile, options)
        return
    plan = solve(profile, options).plan
    assert plan.solver is not None
    assert plan.predicted is not None
    assert plan.predicted.step_s == pytest.approx(best[0], rel=EXACT)
    assert plan.solver.status == "optimal"
    assert plan.solver.bound_s == pytest.approx(best[0], rel=EXACT)
    assert predict(plan, profile).step_s == plan.predicted.step_s
    assert not overfull(plan.predicted)


@pytest.mark.parametrize("seed", sweep([*range(14), 19, 23, 38, 44, 74], quick=[0, 1, 2, 8, 9, 19, 23, 38, 44, 74]))
def test_the_plan_equals_exhaustive_search(seed):
    """Over every order of workers, cut, remat subset and micro-batch count, nothing is faster than the plan."""
    check_against_brute_force(seed, single(schedule="gpipe", gap=0))


@pytest.mark.parametrize("seed", sweep(range(0, 28, 4), quick=4))
def test_cbc_finds_the_same_optimum(seed):
    """The bundled CBC proves the same plans optimal as HiGHS."""
    check_against_brute_force(seed, single(schedule="gpipe", gap=0, solver="cbc"))


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("seed", [1, 4, 7, 15, 22])
def test_a_fixed_remat_is_kept_and_still_optimal(seed, remat):
    """With remat fixed the plan is the best of those that rematerialise nothing, or everything."""
    check_against_brute_force(seed, single(schedule="gpipe", gap=0, remat=remat))


@pytest.mark.parametrize("seed", sweep([3, 6], quick=1))
def test_six_partitions_on_three_workers(seed):
    """The largest instances that exhaustive search can take in a moment are solved to the optimum too."""
    profile = random_instance(seed, partitions=6, workers=3, tight=True, busy=True)
    best = best_plan(profile)
    assert best is not None
    assert solve(profile, single(schedule="gpipe", gap=0)).plan.solver.objective_s == pytest.approx(best[0], rel=EXACT)


@pytest.mark.parametrize("seed", range(8))
def test_option_pins_are_kept_and_the_rest_is_optimal(seed):
    """A pin of the options binds like one of the profile."""
    profile = random_instance(seed, partitions=4, workers=3)
    pins = {"p1": "worker:2", "p3": "kind0"} if seed % 2 else {"p0": "host1"}
    best = best_plan(profile, pins=pins)
    assert best is not None
    plan = solve(profile, single(schedule="gpipe", gap=0, pins=pins)).plan
    assert plan.predicted.step_s == pytest.approx(best[0], rel=EXACT)
    for name, pin in pins.items():
        assert profile.matches(pin, profile.worker[plan.placement[name]])


@pytest.mark.parametrize("seed", sweep(range(12), quick=6))
def test_with_a_gap_the_plan_is_within_it(seed):
    """A plan for gap 5 % is at most 5 % above the optimum, and the bound below it."""
    profile = random_instance(seed, partitions=5, workers=3, late_updates=seed % 2 == 0)
    best = best_plan(profile)
    assert best is not None
    report = solve(profile, single(schedule="gpipe", gap=0.05)).plan.solver
    assert best[0] * (1 - EXACT) <= report.objective_s <= best[0] / 0.95 * (1 + EXACT)
    assert report.bound_s <= best[0] * (1 + EXACT)
    assert report.status == "optimal"


def test_colocated_partitions_share_a_worker():
    """Partitions of one label stay together even where cutting between them would be faster."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    together = tuple(
        replace(each, colocate="tied") if each.name in ("p0", "p2") else each for each in profile.partitions
    )
    plan = solve(replace(profile, partitions=together), single(schedule="gpipe", gap=0)).plan
    assert plan.placement["p0"] == plan.placement["p2"]
    assert len(solve(profile, single(schedule="gpipe", gap=0)).plan.stages[0].partitions) == 2


def test_a_worker_that_only_slows_down_is_left_out():
    """One worker out of two is used where the other is a hundred times slower."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 100.0])
    assert solve(profile, single()).plan.workers == ("worker:0/cpu",)


def test_micro_batch_sizes_without_a_price_are_not_chosen():
    """A partition measured at one size only leaves the counts that give that size."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0])
    only = tuple(each for each in profile.measurements if each.micro_batch == 4)
    solution = solve(replace(profile, measurements=only), single(schedule="gpipe", gap=0))
    assert solution.plan.micro_batch_size == 4
    assert {c.micro_batches: c.status.partition(":")[0] for c in solution.plan.candidates} == {
        1: "infeasible", 2: "chosen", 4: "infeasible", 8: "infeasible"
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_another_batch_size_is_solved_and_stored(seed):
    """`batch_size` replaces the profile's, in the plan's workload too."""
    plan = solve(random_chain(seed, partitions=4, workers=2), single(batch_size=6, gap=0)).plan
    assert plan.workload.batch_size == 6
    assert plan.micro_batches * plan.micro_batch_size == 6
