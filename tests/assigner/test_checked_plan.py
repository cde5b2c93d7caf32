"""Plans held against their profiles."""

from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.formats.solverreport import Baseline, Candidate, SolverReport, WhatIf
from assigner.schedule.simulate import predict, priced
from assigner.validation.checkedplan import checked_plan

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])
SLOWER = make_profile(work=[2e-3] * 4, slowness=[1, 2])
STAGES = [(0, ["p0", "p1"]), (1, ["p2", "p3"])]
OTHER = make_plan(PROFILE, [(0, ["p0", "p1", "p2"]), (1, ["p3"])]).stages


@pytest.fixture
def plan():
    """A plan with a proof, a candidate, a what-if and a baseline."""
    found = priced(make_plan(PROFILE, STAGES), PROFILE)
    step = found.predicted.step_s
    return replace(
        found, solver=SolverReport("HiGHS", "1", "optimal", step, step, 0.0, 0.1),
        baselines=(Baseline("equal split", 2 * step),), what_if=(WhatIf("worker", "one more", step / 2, step / 2),),
        candidates=(Candidate("gpipe", 4, 2, step, step, "chosen"),),
    )  # fmt: skip


def test_a_plan_that_holds_is_as_it_was(plan):
    """The same object, and nothing to say; with its profile and without."""
    assert checked_plan(plan, PROFILE) == (plan, ())
    assert checked_plan(plan) == (plan, ())


def test_an_edited_plan_is_priced_anew(plan):
    """The new step, said beside the old one; proof, candidates and what-ifs are of the other placement."""
    edited = replace(plan, stages=OTHER)
    found, (note,) = checked_plan(edited, PROFILE)
    assert found.predicted == predict(edited, PROFILE)
    assert (found.solver, found.candidates, found.what_if) == (None, (), ())
    assert found.baselines == plan.baselines, "baselines are the profile's"
    assert "priced anew with the profile it was solved from" in note
    assert "changed since" in note
    assert "what was proven of it is left out" in note


@pytest.mark.parametrize("figure", ["peak_bytes", "compute_s"])
def test_memory_or_a_workers_time_alone_is_enough(plan, figure):
    """A deeper warm-up may cost no time, nor more work where there is time: what is stored is not the plan's."""
    other = replace(plan, predicted=replace(plan.predicted, workers=tuple(
        replace(each, **{figure: getattr(each, figure) / 2}) for each in plan.predicted.workers
    )))  # fmt: skip
    found, (note,) = checked_plan(other, PROFILE)
    assert found.predicted == plan.predicted
    assert "its workers' times or memory are not" in note


def test_another_profile(plan):
    """Its price, the reason, and no baselines: they were priced by the plan's own."""
    found, (note,) = checked_plan(plan, SLOWER, own=False)
    assert found.predicted == predict(plan, SLOWER)
    assert found.baselines == ()
    assert "the profile that was named" in note
    assert "changed since" not in note


def test_strange_workers_show_without_a_profile(plan):
    """A prediction of other workers than the plan's is left out, and the worker is named."""
    moved = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], sole_worker="worker:7/cuda:3")))
    found, (note,) = checked_plan(moved)
    assert (found.predicted, found.solver) == (None, None)
    assert "worker:1/cpu" in note


def test_a_plan_that_does_not_fit_its_own_profile(plan):
    """It was edited after all: what it says of itself is left out, with the reason."""
    found, notes = checked_plan(plan, doubt="does not fit it: why", misfit=True)
    assert found.predicted is None
    assert notes[0] == "does not fit it: why"
    assert "changed since" in notes[1]


def test_a_doubt_alone_keeps_the_figures(plan):
    """Where the profile has changed, the plan may still be as it was solved."""
    assert checked_plan(plan, doubt="x has changed since") == (plan, ("x has changed since",))


def test_a_plan_that_cannot_run(plan):
    """Stages in an order that waits for itself have no figures."""
    found, (note,) = checked_plan(replace(plan, stages=plan.stages[::-1]), PROFILE)
    assert found.predicted is None
    assert "cannot price it" in note


@pytest.mark.parametrize(("change", "kept"), [({}, True), ({"stages": OTHER}, False), ({"objective": "cost"}, False)])
def test_a_plan_without_a_prediction_gets_one(plan, change, kept):
    """Its proof stays where it is of a step that takes as long."""
    found, (note,) = checked_plan(replace(plan, predicted=None, **change), PROFILE)
    assert found.predicted is not None
    assert "its file has no prediction" in note
    assert (found.solver is not None) is kept
