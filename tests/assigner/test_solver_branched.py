"""Graphs with branches under 1F1B: stages that are no intervals of one order, at any warm-up depths."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from brute_force import random_instance
from builders import make_profile, single
from sweeps import sweep

from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.simulate import predict
from assigner.solver import solve
from assigner.solver.baselines import find_baselines
from assigner.solver.free.branched import BranchedCandidate
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import BASELINE
from assigner.solver.methods.dynamic_program import DynamicProgram
from assigner.solver.problem.hints import resolve
from assigner.solver.search.search import Search

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

COUNT = 4


def least_step_s(profile: Profile) -> float:
    """Of all plans with one stage on each of two workers, or all on one, by enumeration."""
    names, (one, other) = [each.name for each in profile.partitions], [worker.name for worker in profile.workers]
    readers = {name: {edge.target for edge in profile.edges if edge.source == name} for name in names}
    found = []
    for size in range(1, len(names) + 1):
        for behind in map(set, itertools.combinations(names, size)):
            if any(readers[name] - behind for name in behind):
                continue  # what reads a partition of the last stage is in it, too
            parts = [tuple(name for name in names if (name in behind) == last) for last in (False, True)]
            for workers in ((one, other), (other, one)):
                held = [(worker, part) for worker, part in zip(workers, parts, strict=True) if part]
                for depths in itertools.combinations_with_replacement(range(COUNT, 0, -1), len(held)):
                    stages = tuple(
                        Stage(worker, part, in_flight=depth) for (worker, part), depth in zip(held, depths, strict=True)
                    )
                    found.append(Plan(workload=profile.workload, schedule="1f1b", micro_batches=COUNT,
                                      micro_batch_size=1, stages=stages))  # fmt: skip
    return min(predict(plan, profile).step_s for plan in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sweep(range(24), quick=4))
def test_no_convex_stages_are_faster(seed):
    """Of few partitions all of them are looked at, and those that are best at usual warm-ups at others, too."""
    profile = random_instance(seed, partitions=6, workers=2, busy=True, graph=True)
    edges = tuple(replace(edge, bytes_per_sample=8 * edge.bytes_per_sample) for edge in profile.edges)
    profile = replace(profile, edges=edges)
    found = solve(profile, single(schedule="1f1b", micro_batches=COUNT)).plan.predicted
    assert found is not None
    assert found.step_s <= least_step_s(profile) * 1.01  # where the search without --gap stops


def test_where_the_program_takes_long_the_search_begins_with_the_baselines(monkeypatch):
    """Each candidate has one of theirs at its own count, none asks the dynamic program, and the end is a better one."""
    profile = make_profile(
        work=[1e-3, 2e-3, 3e-3, 2e-3, 3e-3, 1e-3, 2e-3], slowness=[1.0, 1.4, 1.9],
        edges=[(0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6)],
    )  # fmt: skip
    monkeypatch.setattr(tuning, "KNOWN_VISITS", 0)
    monkeypatch.setattr(DynamicProgram, "run", lambda *_, **__: pytest.fail("the dynamic program ran"))
    search = Search(*resolve(profile, single(schedule="1f1b", remat="never")), None)
    simple = find_baselines(search.problem)
    search.begin_with(simple)
    search.price()
    for candidate in search.candidates:
        assert isinstance(candidate, BranchedCandidate)
        candidate.start()
        assert candidate.best is not None
        assert candidate.best.found_by.startswith(BASELINE)
    search.run()
    alone = [each.step_s for each in simple if each.plan and not (each.plan.is_looped or each.plan.is_replicated)]
    assert search.state.best_value < min(alone)
