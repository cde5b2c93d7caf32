"""1F1B by kinds of workers: bounds hold for every plan, and large fleets get plans that no smaller question beats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from brute_force import random_instance
from builders import random_chain, single
from sweeps import sweep

from assigner.errors import InfeasibleError
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve
from assigner.solver.fleet.kind_sweeps import KindSweeps
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
        assert placed


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
