"""Infeasible problems are said to be so, with a way out that really is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_profile

from assigner.cost import CostModel
from assigner.errors import InfeasibleError
from assigner.profile import Worker
from assigner.solver import SolveOptions, solve
from assigner.solver.problem import Problem
from assigner.solver.why import relaxations


def refused(profile, options=None):
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, options)
    assert caught.value.exit_code == 3
    return caught.value


def way_out(profile, hint, options=None):
    """The relaxation that a hint speaks of."""
    problem = Problem(profile, options or SolveOptions(), CostModel(profile))
    found = [each for each in relaxations(problem) if each.hint.split("{")[0] in hint]
    return found[0]


def heavy(**changes):
    """Three partitions whose activations need 8 MB each unless they are rematerialised."""
    given = {"work": [1e-3] * 3, "slowness": [1.0, 1.0], "capacity": 1.5e7, "activation": 1e6}
    return make_profile(**(given | changes))


def test_remat_is_the_way_out_where_it_was_forbidden():
    """The message gives need and capacity of the worst partition; the hint's change is feasible."""
    error = refused(heavy(capacity=1.1e7), SolveOptions(remat="never"))
    assert error.message == "p1 needs 12.4 MiB at 8 micro-batches; the largest worker has 10.5 MiB"
    assert error.hint == "--remat auto fits"
    assert solve(heavy(capacity=1.1e7), SolveOptions(remat="auto")).plan.stages


def test_another_micro_batch_count_is_the_way_out():
    """One large micro-batch needs too much memory for its messages; the count that the hint names fits."""
    profile = heavy(edge_bytes=5e5, activation=1e5, capacity=1.25e7, slowness=[1.0] * 3, parameters=1e6)
    error = refused(profile, SolveOptions(micro_batches=1))
    assert error.hint.startswith("--micro-batches ")
    count = int(error.hint.split()[1])
    assert solve(profile, SolveOptions(micro_batches=count)).plan.micro_batches == count


def test_a_pin_is_named_and_dropping_it_helps():
    """Two partitions pinned to a worker that holds one: the hint drops a pin."""
    profile = heavy(capacity=[1e9, 9e6], parameters=1e6)
    options = SolveOptions(pins={"p0": "worker:1", "p2": "worker:1"})
    error = refused(profile, options)
    assert "pin" in error.hint
    relaxed = way_out(profile, error.hint, options)
    assert solve(relaxed.profile, relaxed.options).plan.stages


def test_pins_that_contradict_each_other_are_named():
    """A partition pinned to two workers is on neither."""
    profile = heavy()
    pinned = tuple(replace(each, pin="kind0") if each.name == "p1" else each for each in profile.partitions)
    error = refused(replace(profile, partitions=pinned), SolveOptions(pins={"p1": "worker:1"}))
    assert error.message == "p1 is pinned to kind0, worker:1, and no worker matches that"
    assert error.hint == "without the pin p1=worker:1 it fits"


def test_a_missing_measurement_is_named():
    """A partition that was measured nowhere cannot be placed."""
    profile = heavy()
    some = tuple(each for each in profile.measurements if each.partition != "p1")
    assert "p1 was not measured" in refused(replace(profile, measurements=some)).message


def test_workers_that_cannot_talk_need_links():
    """Both workers are needed, and there is no link: the hint asks for one."""
    error = refused(heavy(work=[1e-3] * 6, capacity=2.2e7, links=False, parameters=1e6))
    assert "links" in error.hint


def test_a_reserve_that_takes_all_the_memory_is_named():
    """With a smaller reserve the model fits, and the hint says so."""
    profile = heavy(capacity=2e7)
    workers = tuple(
        Worker(each.name, each.kind, each.host, each.device, each.memory_bytes, reserve_bytes=1.9e7)
        for each in profile.workers
    )
    assert refused(replace(profile, workers=workers)).hint == "with no memory held in reserve it fits"


@pytest.mark.parametrize("seed", range(40))
def test_random_infeasible_problems_have_a_feasible_way_out(seed):
    """Where exhaustive search finds nothing, the solver says so, and the problem of its hint has a plan."""
    profile = random_instance(seed, partitions=4, workers=2, missing=0.3, pins=True)
    small = tuple(replace(each, memory_bytes=6e6 + seed * 1e5) for each in profile.workers)
    profile = replace(profile, workers=small)
    if best_plan(profile) is not None:
        assert solve(profile).plan.stages
        return
    error = refused(profile)
    relaxed = way_out(profile, error.hint)
    assert solve(relaxed.profile, relaxed.options).plan.stages
