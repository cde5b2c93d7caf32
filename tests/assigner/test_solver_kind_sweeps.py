"""1F1B by kinds of workers: bounds hold for every plan, and large fleets get plans that no smaller question beats."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from brute_force import random_instance
from builders import random_chain, single
from sweeps import sweep

from assigner.errors import InfeasibleError
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve
from assigner.solver.fleet.kind_sweeps import KindSweeps, StepPrices
from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.fleet.relaxation import KindRelaxation
from assigner.solver.limits import tuning
from assigner.solver.problem.hints import resolve
from assigner.solver.search.search import Search


@pytest.mark.parametrize("objective", ["step", "throughput", "latency"])
@pytest.mark.parametrize("seed", sweep(range(24), quick=4))
def test_no_plan_is_below_the_bound(seed, objective):
    """However little is asked for, and where plans that take more are of no interest."""
    profile = random_instance(
        seed, partitions=5, workers=3, busy=seed % 2 == 0, tight=seed % 3 > 0, late_updates=seed % 4 == 0
    )  # fmt: skip
    schedule = "1f1b" if objective == "step" else "auto"
    options = SolveOptions(schedule=schedule, objective=objective, gap=0.0, max_replicas=1)
    search = Search(*resolve(profile, options))
    for candidate in search.candidates:
        try:
            report = solve(profile, replace(options, micro_batches=candidate.micro_batches)).plan.solver
        except InfeasibleError:
            continue
        least = report.objective_s
        placed = []
        sweeps = KindSweeps(candidate.table, objective, place=lambda *stages, into=placed: into.append(stages))
        for below in (math.inf, 2 * least, 1.05 * least, least * (1 + 1e-9)):
            assert sweeps.bound(below) <= least * (1 + 1e-9)
            assert sweeps.bound(below, looks=24) <= least * (1 + 1e-9)
        assert placed


@pytest.mark.parametrize("seed", sweep(range(6), quick=2))
def test_what_a_step_takes_of_a_stage_is_the_largest_of_its_terms(seed):
    """By the trip behind the stage; and no less than the pipeline's sum and what any trip tells that is no shorter."""
    profile = random_instance(seed, partitions=5, workers=3, busy=seed % 2 == 0, tight=seed % 3 > 0)
    candidate = Search(*resolve(profile, single(schedule="1f1b", micro_batches=4))).candidates[0]
    fleet, many, depths = KindRelaxation(candidate.table, server="both"), 4, [1, 2, 3, 4]
    stages = [OptionArrays(candidate.table, fleet.kinds, 5, fleet.links, each) for each in depths]
    prices, trips = StepPrices(stages, depths), np.linspace(0.0, 3 * float(stages[0].load[0, 0, 0]), 40)
    for kind, first, length in np.ndindex(*stages[0].forward.shape):
        behind = np.tile(trips, (length + 1, 1))
        seconds, more, loads = (each[:, length] for each in prices.at(kind, first, length + 1, behind))
        for n, (stage, w) in enumerate(zip(stages, depths, strict=True)):
            f, b = stage.forward[kind, first, length], stage.backward[kind, first, length]
            update = stage.update[kind, first, length] if first == 0 else 0.0
            if math.isinf(stage.load[kind, first, length]):
                assert np.isinf(seconds[n])
                assert np.isinf(loads[n]).all()
                continue
            busy_f, busy_b = (each[kind, first, length] for each in stage.busy)
            wait = trips + f - w * (f + busy_f), trips - busy_f - (w - 1) * (b + busy_b)
            if w < many:
                busy = stage.load[kind, first, length] + sum(np.maximum(0.0, each) for each in wait)
                said = np.maximum(busy, math.ceil(many / w) * (trips + f + b) + update)
            else:
                turns = trips + f + b + (many - 1) * max(f + busy_f, b + busy_b) + update
                said = np.maximum(stage.load[kind, first, length], turns)
            assert loads[n] == pytest.approx(said)
            apart = said - trips - seconds[n]
            assert all(more[n, k] <= apart[k:].min() * (1 + 1e-9) + 1e-12 for k in range(len(trips)))


@pytest.mark.parametrize("seed", sweep((4, 6), quick=1))
def test_few_micro_batches_on_many_workers_are_bounded_by_their_sum_and_their_waits(seed, monkeypatch):
    """More looks tell more: a pipeline of a small sum has stages that take long, and waits for these."""
    monkeypatch.setattr(tuning, "NARROW_STEP", 2e-2)
    profile = random_chain(seed, partitions=20, workers=8, tight=True)
    (candidate,) = Search(*resolve(profile, single(schedule="1f1b", micro_batches=4))).candidates
    sweeps = KindSweeps(candidate.table, "step", place=lambda *_: None)
    once = sweeps.bound(10.0)
    found = [sweeps.bound(10.0, looks=8) for _ in range(8)]
    assert sweeps.done
    assert [once, *found] == sorted([once, *found])
    assert found[-1] > 1.05 * once


@pytest.mark.parametrize(("tight", "busy"), [(False, 0.3), (True, 0.0)])
def test_an_open_schedule_is_no_worse_than_gpipe(tight, busy, monkeypatch):
    """What takes long goes by kinds of workers; here it is had to."""
    profile = random_chain(3, partitions=14, workers=8, tight=tight, busy=busy)
    asked = single(gap=0.05, micro_batches=8)
    monkeypatch.setattr(tuning, "FEW_VISITS", 0)
    either, gpipe = (solve(profile, replace(asked, schedule=each)).plan for each in ("one-stage", "gpipe"))
    assert either.predicted.step_s <= gpipe.predicted.step_s
    assert either.solver.bound_s >= 0.8 * either.predicted.step_s
    assert not overfull(predict(either, profile))


@pytest.mark.parametrize("seed", sweep(range(8), quick=2))
def test_plans_by_kinds_are_near_those_by_workers(seed, monkeypatch):
    """Memory binds: stages keep as many micro-batches in flight as hide what lies behind them, and recompute for it."""
    profile = random_chain(seed, partitions=10, workers=5, tight=True, busy=0.2 * (seed % 2))
    asked = single(gap=0.02, schedule="1f1b", micro_batches=8)
    by_workers = solve(profile, asked).plan
    monkeypatch.setattr(tuning, "FEW_VISITS", 0)
    by_kinds = solve(profile, asked).plan
    assert not overfull(predict(by_kinds, profile))
    assert by_kinds.solver.bound_s <= by_workers.predicted.step_s * (1 + 1e-9)
    assert by_kinds.predicted.step_s <= 1.03 * by_workers.predicted.step_s


def test_first_plans_are_looked_for_within_wider_limits(monkeypatch):
    """Where nothing is known and no pipeline keeps to the limit that usually does."""
    profile = random_chain(3, partitions=14, workers=8, tight=True)
    (candidate,) = Search(*resolve(profile, single(schedule="1f1b", micro_batches=8))).candidates
    placed = []
    monkeypatch.setattr(tuning, "START_LIMIT", 1.05)
    monkeypatch.setattr(tuning, "DEEPER", (1.0,))
    for wider in (0, 8):
        monkeypatch.setattr(tuning, "WIDER_STARTS", wider)
        sweeps = KindSweeps(candidate.table, "step", place=lambda *stages: placed.append(stages))
        sweeps.start(lambda: math.inf)
        assert bool(placed) is (wider > 0)
