"""Warm-up depths: their neighbourhood, and what the search finds with it."""

from dataclasses import replace
from pathlib import Path

import pytest
from builders import single

from assigner.formats.profile import load_profile
from assigner.schedule.cost import CostModel
from assigner.schedule.timing import step_s
from assigner.solver import solve
from assigner.solver.pipelines.simulated import falling, fitting, nearby

PROFILES = Path(__file__).parent.parent.parent / "profiles"


def test_neighbours_change_one_stage_and_never_grow():
    """A deeper stage takes those in front along, a shallower one those behind; no one leaves its range."""
    ranges = [range(1, 9), range(1, 9), range(1, 3)]
    found = list(nearby((3, 2, 1), ranges))
    assert found[:3] == [(4, 2, 1), (3, 3, 1), (3, 2, 2)]
    assert {(7, 2, 1), (4, 4, 1), (6, 6, 1), (2, 2, 1), (1, 1, 1), (3, 1, 1)} <= set(found)
    assert (3, 2, 1) not in found
    assert set(found) <= set(falling(ranges, 8))
    assert len(found) == len(set(found))


def test_neighbours_of_depths_without_a_choice():
    """Where every stage has one depth there is no other."""
    assert list(nearby((4, 4), [range(4, 5), range(4, 5)])) == []
    assert list(fitting([(9, 1)], [range(1, 4), range(2, 4)])) == [(3, 2)]


def test_single_moves_lead_everywhere():
    """From any depths to any others: local search is not caught by what a move can be."""
    ranges = [range(1, 5), range(2, 5), range(1, 4)]
    everything = set(falling(ranges, 4))
    reached, open_ = set(), [min(everything)]
    while open_:
        at = open_.pop()
        if at not in reached:
            reached.add(at)
            open_ += nearby(at, ranges)
    assert reached == everything


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed3-gpt", "smallmem3-gpt"])
def test_many_micro_batches_are_warmed_up_deep_enough(name):
    """With too many choices of depths to try them all, the plan is still within the gap, and no depth makes it better.

    The profiles' wires are slow: the first worker must be several micro-batches ahead.
    """
    profile = load_profile(PROFILES / name / "profile.json")
    plan, cost = solve(profile, single(micro_batches=16)).plan, CostModel(profile)
    assert plan.solver.status == "optimal"
    first, *others = plan.stages
    for depth in range(1, 17):
        tried = replace(plan, stages=(replace(first, in_flight=depth), *others))
        if depth >= (others[0].in_flight or len(others)):
            assert step_s(tried, cost) >= plan.predicted.step_s * (1 - 1e-9)
