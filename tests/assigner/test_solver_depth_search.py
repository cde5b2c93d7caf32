"""Warm-up depths by branch and bound: bounds of boxes, the best depths of all, and the proof that they close."""

from __future__ import annotations

import random

import numpy as np
import pytest
from brute_force import random_instance
from builders import make_profile, single

from assigner.solver import SolveOptions, solve
from assigner.solver.limits.clock import OutOfTime
from assigner.solver.methods.candidate import ENUMERATION
from assigner.solver.pipelines.depth_search import DepthSearch, _Turns
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.pipelines.share_search import ShareSearch
from assigner.solver.pipelines.shared import SharedCandidate
from assigner.solver.pipelines.simulated import falling
from assigner.solver.problem.hints import resolve
from assigner.solver.search.search import Search
from benchmarks.solver.clusters import cluster


def _pipelines(profile, micro_batches, most=6):
    """A candidate of the profile, and pipelines of it with their bounds, the longest first."""
    search = Search(*resolve(profile, single(schedule="1f1b", micro_batches=micro_batches, gap=0.0)))
    (candidate,) = search.candidates
    assert isinstance(candidate, PipelineCandidate)
    candidate.price()
    found = candidate.program.run(width=5_000, dominance=False, most=5_000).pipelines
    return candidate, sorted(found, key=lambda each: (-len(each[1]), each[0]))[:most]


def _ranges(pipeline):
    return [range(each.least_depth, each.most_depth + 1) for each in pipeline]


def _chain(seed, micro_batches):
    return random_instance(seed, partitions=5, workers=3, busy=True, tight=seed % 2 == 0, batch=micro_batches)


@pytest.mark.parametrize("seed", range(4))
def test_a_box_of_one_choice_is_bounded_by_its_step_time(seed):
    """The longest way through the conditions is what the simulator says, messages that keep workers busy included."""
    candidate, pipelines = _pipelines(_chain(seed, 6), 6)
    compared = 0
    for price, pipeline in pipelines:
        for depths in list(falling(_ranges(pipeline), 6))[::5]:
            search = DepthSearch(candidate.options, [(price, pipeline)])
            search._open.low[-len(pipeline) :, 0] = search._open.high[-len(pipeline) :, 0] = depths
            ((bound, _, found),) = search.split(np.inf)
            value, _ = candidate.plans.worth(candidate.plans.plan_of(pipeline, depths))
            assert found == depths
            assert bound == pytest.approx(value, rel=1e-12)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_a_box_takes_less_than_its_bound(seed):
    """Whatever ranges the depths are held to."""
    rng = random.Random(seed)
    candidate, pipelines = _pipelines(_chain(seed, 8), 8)
    for _, pipeline in pipelines:
        depths = list(falling(_ranges(pipeline), 8))
        low, high = (np.array(each) for each in (rng.choice(depths), rng.choice(depths)))
        low, high = np.minimum(low, high), np.maximum(low, high)
        search = DepthSearch(candidate.options, [(0.0, pipeline)])
        search._open.low[-len(pipeline) :, 0], search._open.high[-len(pipeline) :, 0] = low, high
        (bound,) = search._bounds(search._open)
        inside = [each for each in depths if (low <= each).all() and (each <= high).all()]
        best = min(candidate.plans.worth(candidate.plans.plan_of(pipeline, each))[0] for each in inside)
        assert 0 < bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_ends_with_the_best_depths_of_all(seed):
    """Over several pipelines at once, of unlike lengths: the least of every choice, each simulated."""
    candidate, pipelines = _pipelines(_chain(seed, 8), 8, most=40)
    pipelines = pipelines[::4]
    best = min(
        candidate.plans.worth(candidate.plans.plan_of(pipeline, depths))[0]
        for _, pipeline in pipelines
        for depths in falling(_ranges(pipeline), 8)
    )
    search, found = DepthSearch(candidate.options, pipelines), np.inf
    while search.bound < found:
        for bound, _, _ in search.split(found):
            found = min(found, bound)
    assert found == pytest.approx(best, rel=1e-9)


def test_one_pipeline_without_a_choice():
    """A single stage that has one depth is handed out at once, and nothing is left."""
    profile = make_profile(work=[1.0], slowness=[1.0], batch=1)
    candidate, pipelines = _pipelines(profile, 1)
    search = DepthSearch(candidate.options, pipelines)
    assert [depths for _, _, depths in search.split(np.inf)] == [(1,)]
    assert search.bound == np.inf


@pytest.mark.long
@pytest.mark.parametrize("links", ["kinds", "hosts"])
def test_1f1b_is_proven_where_there_are_too_many_depths_to_try_all(links):
    """14 partitions on 6 workers of three kinds, 16 micro-batches: no gap is left, and looking at all has closed it."""
    solver = solve(
        cluster(14, 6, links=links, hosts=3), single(schedule="1f1b", micro_batches=16, gap=0.0, time_limit=300)
    ).plan.solver
    assert (solver.status, ENUMERATION in solver.proven_by) == ("optimal", True)
    assert solver.gap <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_sharing_takes_less_than_its_bound(seed):
    """Of stages that unlike workers share in unequal parts: the simulated step at any depths of a box is no shorter."""
    rng, most = random.Random(seed), 6
    profile = random_instance(seed, partitions=3, workers=4, busy=True, batch=most)
    search = Search(*resolve(profile, SolveOptions(schedule="1f1b", micro_batches=most, gap=0.0)))
    search.price()
    candidate = next(each for each in search.candidates if isinstance(each, SharedCandidate))
    found = candidate.program.run(width=5_000, dominance=False, most=5_000).pipelines
    compared = 0
    for _, pipeline in rng.sample(found, min(30, len(found))):
        ways = list(ShareSearch(candidate, 1_000).sharings(pipeline))
        for shared in rng.sample(ways, min(3, len(ways))):
            depths = list(falling([range(each.least_depth, each.most_depth + 1) for each in shared], most))
            low, high = (np.array(each) for each in (rng.choice(depths), rng.choice(depths)))
            low, high = np.minimum(low, high), np.maximum(low, high)
            boxes = DepthSearch(candidate.options, [(0.0, shared)])
            boxes._open.low[:, 0], boxes._open.high[:, 0] = low, high
            (bound,) = boxes._bounds(boxes._open)
            inside = [each for each in depths if (low <= each).all() and (each <= high).all()]
            best = min(candidate.plans.worth(candidate.plans.plan_of(shared, each))[0] for each in inside)
            assert 0 < bound <= best * (1 + 1e-12)
            compared += best < np.inf
    assert compared > 20


def test_the_end_of_the_time_ends_the_search():
    """While boxes are bounded, micro-batch by micro-batch, and while the turns of workers that share are made."""

    def over():
        raise OutOfTime

    candidate, pipelines = _pipelines(_chain(0, 6), 6)
    search = DepthSearch(candidate.options, pipelines, check=over)
    with pytest.raises(OutOfTime):
        search.split(np.inf)
    with pytest.raises(OutOfTime):
        _Turns([(6,), (2, 4)], 6, over)
