"""The sample profiles and their plans are sound, belong together, and are priced as they say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from assigner.formats.plan import load_plan
from assigner.formats.profile import load_profile
from assigner.schedule.simulate import overfull, predict

SAMPLES = sorted(path.parent for path in (Path(__file__).parent.parent / "profiles").glob("*/profile.json"))


def test_there_are_three() -> None:
    """Three clusters at least were measured."""
    assert len(SAMPLES) >= 3


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_a_sample_plan_is_priced_as_it_says(folder: Path) -> None:
    """The simulator gives the stored prediction again, the plan fits, and its profile is the one beside it."""
    profile, plan = load_profile(folder / "profile.json"), load_plan(folder / "plan.json")
    assert plan.predicted is not None
    assert plan.profile is not None
    again = predict(plan, profile)
    assert again.step_s == pytest.approx(plan.predicted.step_s, rel=1e-12)
    assert not overfull(again)
    assert plan.profile.sha256 == hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_a_sample_plan_beats_its_baselines(folder: Path) -> None:
    """No baseline with one stage a worker is faster than the plan, and the bound is not above it."""
    plan = load_plan(folder / "plan.json")
    assert plan.predicted is not None
    assert plan.solver is not None
    loose = ("greedy, earliest finish", "weighted heuristic")  # they may give a worker several stages
    steps = [each.step_s for each in plan.baselines if each.step_s is not None and each.name not in loose]
    if plan.solver.options["pins"]:
        steps += [each.step_s for each in plan.baselines if each.step_s is not None]  # pins leave no other possible
    assert steps
    assert plan.predicted.step_s <= min(steps) * (1 + 1e-9)
    assert plan.solver.bound_s <= plan.predicted.step_s
