"""What rematerialising costs: as measured, or a forward where it was not; the simulator and the solver agree on it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_profile, random_chain

from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.simulate import predict
from assigner.schedule.timing import stage_s
from assigner.solver import SolveOptions, solve

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

WORKER = "worker:0/cpu"


def with_recompute(profile: Profile, share: float) -> Profile:
    """The profile with recomputes that take a share of a forward."""
    measured = [replace(each, recompute_s=share * each.forward_s) for each in profile.measurements]
    return replace(profile, measurements=tuple(measured))


@pytest.mark.parametrize(("share", "seconds"), [(None, 1.0), (0.5, 0.5), (1.25, 1.25), (0.0, 0.0)])
def test_a_recompute_costs_what_was_measured(share: float | None, seconds: float) -> None:
    """Between sizes too; where it was not measured it costs a forward."""
    profile = make_profile(work=[1.0], slowness=[1.0])
    profile = profile if share is None else with_recompute(profile, share)
    cost = CostModel(profile)
    assert cost.partition("p0", WORKER, 2).recompute_s == pytest.approx(2 * seconds)
    plan = Plan(
        workload=profile.workload, micro_batches=4, micro_batch_size=2, stages=(Stage(WORKER, ("p0",), ("p0",)),)
    )
    assert stage_s(cost, plan, 0, WORKER, ActionKind.FORWARD) == pytest.approx(2.0)
    assert stage_s(cost, plan, 0, WORKER, ActionKind.BACKWARD) == pytest.approx(4.0 + 2 * seconds)
    assert predict(plan, profile).step_s == pytest.approx(4 * (6.0 + 2 * seconds) + 1e-4)


@pytest.mark.parametrize("seed", [0, 2])
def test_the_solver_counts_it(seed: int) -> None:
    """Where memory forces recomputing, a cheaper recompute gives a shorter step, and the simulator says the same."""
    profile = random_chain(seed, partitions=6, workers=2, tight=True)
    options = SolveOptions(schedule="gpipe", gap=0)
    steps = []
    for share in (0.0, 0.5, 1.0):
        made = with_recompute(profile, share)
        plan = solve(made, options).plan
        assert plan.predicted is not None
        assert predict(plan, made).step_s == pytest.approx(plan.predicted.step_s)
        steps.append(plan.predicted.step_s)
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    unmeasured = solve(profile, options).plan.predicted
    assert unmeasured is not None
    assert steps[2] == pytest.approx(unmeasured.step_s)
