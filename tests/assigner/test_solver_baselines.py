"""The simpler ways to place a profile, against hand-made splits."""

from __future__ import annotations

import itertools
import random

import pytest
from builders import make_plan, make_profile, random_chain

from assigner.simulate import predict
from assigner.solver import SolveOptions, solve
from assigner.solver.baselines import least_largest_blocks


def steps(profile, **options):
    return {each.name: each.step_s for each in solve(profile, SolveOptions(**options)).plan.baselines}


def by_hand(profile, stages, counts=(1, 2, 4, 8)):
    return min(predict(make_plan(profile, stages, micro_batches=count), profile).step_s for count in counts)


def test_the_four_baselines_are_what_their_names_say():
    """Each equals its split made by hand, at its own best micro-batch count."""
    profile = make_profile(work=[1e-3, 1e-3, 1e-3, 1e-3, 8e-3, 1e-3], slowness=[1.0, 2.0])
    found = steps(profile)
    p = list(profile.order)
    assert list(found) == ["best single worker", "equal split", "split in proportion to speed", "balance by time"]
    assert found["best single worker"] == pytest.approx(by_hand(profile, [(0, p)]))
    assert found["equal split"] == pytest.approx(by_hand(profile, [(0, p[:3]), (1, p[3:])]))
    assert found["split in proportion to speed"] == pytest.approx(by_hand(profile, [(0, p[:4]), (1, p[4:])]))
    assert found["balance by time"] == pytest.approx(by_hand(profile, [(0, p[:4]), (1, p[4:])]))


@pytest.mark.parametrize("seed", range(10))
def test_no_baseline_beats_the_plan(seed):
    """A proven optimum is never above a simpler way."""
    profile = random_chain(seed, partitions=6, workers=3, tight=seed % 2 == 0)
    plan = solve(profile, SolveOptions(gap=0)).plan
    assert all(each.step_s is None or each.step_s >= plan.predicted.step_s * (1 - 1e-9) for each in plan.baselines)


def test_a_baseline_that_does_not_fit_has_no_step_time():
    """The whole model on one worker does not fit; with everything rematerialised an equal split does."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=1.9e7, activation=1e6)
    found = steps(profile)
    assert found["best single worker"] is None
    assert found["equal split"] is not None
    assert steps(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], links=False))["equal split"] is None


def test_baselines_keep_pins():
    """A split that breaks a pin is not offered for comparison."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    assert steps(profile, pins={"p0": "worker:1"})["equal split"] is None


@pytest.mark.parametrize("seed", range(30))
def test_block_partition_equals_every_cut(seed):
    """The largest block is the least possible, and no block is empty."""
    rng = random.Random(seed)
    seconds = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 8))]
    most = rng.randrange(1, 9)
    blocks = min(most, len(seconds))
    best = min(
        max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, len(seconds))))
        for cuts in itertools.combinations(range(1, len(seconds)), blocks - 1)
    )
    sizes = least_largest_blocks(seconds, most)
    ends = list(itertools.accumulate(sizes))
    assert sum(sizes) == len(seconds)
    assert min(sizes) >= 1
    assert len(sizes) == blocks
    assert max(sum(seconds[end - size : end]) for size, end in zip(sizes, ends, strict=True)) == best
