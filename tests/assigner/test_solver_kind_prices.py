"""Workers that differ in their links alone, taken by kind: a bound of plans with shared stages, and a sharp one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from brute_force import random_instance
from builders import make_profile

from assigner.formats.profile import LinkPoint
from assigner.schedule.cost import CostModel
from assigner.solver import SolveOptions, solve
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.interval_prices import by_kinds
from assigner.solver.problem.problem import Problem
from assigner.solver.search.search import Search


def unlike_links(profile, seed: int):
    """The same profile, every link slower by a share of its own."""
    rng = random.Random(seed)
    links = tuple(
        replace(link, points=tuple(LinkPoint(at.bytes, at.seconds * slow) for at in link.points))
        for link in profile.links
        for slow in [rng.uniform(1.0, 1.6)]
    )
    return replace(profile, links=links)


def test_a_boundary_between_kinds_is_at_the_least_of_their_workers():
    """Two kinds of two workers, eight links between them: none costs less than its kinds' does."""
    profile = unlike_links(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 2.0, 2.0]), 1)
    table = Problem(profile, resolve(profile, SolveOptions())[1], CostModel(profile)).prices(4).intervals
    kinds = by_kinds(table)
    assert len(table.groups) == 4
    assert [len(group) for group in kinds.groups] == [2, 2]
    for left, right in ((0, 1), (1, 0), (0, 0)):
        hops = [
            table.hop(1, table.groups.index((one,)), table.groups.index((other,)))
            for one in kinds.groups[left]
            for other in kinds.groups[right]
            if one != other
        ]
        assert kinds.hop(1, left, right).forward_s == min(hop.forward_s for hop in hops)
        assert kinds.hop(1, left, right).backward_s == min(hop.backward_s for hop in hops)


def test_where_links_are_alike_or_workers_have_an_order_there_is_none():
    """It would say what is said already, or take an order of the workers for none."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 2.0, 2.0])
    for each, options in (
        (profile, SolveOptions()),
        (unlike_links(profile, 1), SolveOptions(order=tuple(worker.name for worker in profile.workers))),
    ):
        problem = Problem(each, resolve(each, options)[1], CostModel(each))
        assert by_kinds(problem.prices(4).intervals) is None


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_by_kinds_is_below_the_best_plan_with_shared_stages(seed, schedule):
    """No more than the least price with the real links, which is no more than the simulator says."""
    base = random_instance(seed, partitions=4, workers=4, tight=seed % 2 == 1, alike=True)
    profile = unlike_links(base, seed)
    best = solve(profile, SolveOptions(schedule=schedule, gap=0)).plan.solver
    search = Search(*resolve(profile, SolveOptions(schedule=schedule, gap=0)))
    search.state.cutoff = 2 * best.objective_s
    told = 0.0
    for candidate in search.candidates:
        if candidate.shares:
            candidate.price()
            before = candidate.bound
            candidate._bound_by_kinds(200)
            told = max(told, candidate.bound - before)
            assert candidate.bound >= before
            exact = candidate.program.run(cutoff=2 * best.objective_s, width=5000).pipelines
            if exact:
                assert candidate.bound <= exact[0][0] * (1 + 1e-9)
    assert told > 0


def test_a_search_that_has_no_time_for_shared_stages_still_bounds_them():
    """The perfect split of all work, not 0."""
    profile = make_profile(work=[1e-3] * 6, slowness=[1.0, 1.0, 2.0, 2.0])
    search = Search(*resolve(profile, SolveOptions(schedule="gpipe")))
    told = []

    def stop(candidate):
        told.append(candidate)
        raise KeyboardInterrupt

    for candidate in search.candidates:
        candidate.start = lambda candidate=candidate: stop(candidate)
    search.run()
    assert told
    assert search.state.interrupted
    assert search.bound_of(shares=True) > 0
