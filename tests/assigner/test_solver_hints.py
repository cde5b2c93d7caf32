"""The user's hints bind, and the rest of the plan is the best that they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_plan, make_profile

from assigner.errors import InfeasibleError, UsageError
from assigner.simulate import predict
from assigner.solver import SolveOptions, completing, solve
from assigner.solver.hints import resolve

EXACT = 1e-6
PROFILE = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 2.0])


def apart(plan, *names):
    return len({plan.placement[name] for name in names}) == len(names)


def in_order(plan, workers):
    found = [workers.index(worker) for worker in plan.workers if worker in workers]
    return found == sorted(found) and set(plan.workers) <= set(workers)


CASES = {
    "apart": ({"apart": (("p0", "p2"),)}, lambda plan: apart(plan, "p0", "p2")),
    "three apart": ({"apart": (("p0", "p1", "p3"),)}, lambda plan: apart(plan, "p0", "p1", "p3")),
    "together": ({"together": (("p1", "p2"),)}, lambda plan: not apart(plan, "p1", "p2")),
    "order": (
        {"order": ("worker:2", "worker:0")},
        lambda plan: in_order(plan, ["worker:2/cpu", "worker:0/cpu"]),
    ),
    "ranks": ({"order": ("ranks",)}, lambda plan: in_order(plan, [f"worker:{n}/cpu" for n in range(3)])),
    "only": ({"only": ("worker:1", "host2")}, lambda plan: set(plan.workers) <= {"worker:1/cpu", "worker:2/cpu"}),
    "max workers": ({"max_workers": 2}, lambda plan: len(plan.workers) <= 2),
    "never": (
        {"rematerialise": {"p1": "never", "p2": "never"}},
        lambda plan: not {"p1", "p2"} & {name for stage in plan.stages for name in stage.rematerialise},
    ),
    "always": (
        {"rematerialise": {"p3": "always"}},
        lambda plan: "p3" in {name for stage in plan.stages for name in stage.rematerialise},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_each_hint_binds_and_the_rest_is_optimal(seed, name):
    """Exhaustive search over the plans that heed the hint finds none that is faster."""
    hints, keeps = CASES[name]
    profile = random_instance(seed, partitions=4, workers=3, tight=seed % 2 == 0, busy=seed % 3 == 0)
    options = SolveOptions(schedule="gpipe", gap=0, **hints)
    best = best_plan(profile, keeps=keeps, rules=hints.get("rematerialise", {}))
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(profile, options)
        return
    plan = solve(profile, options).plan
    assert keeps(plan)
    assert plan.solver.objective_s == pytest.approx(best[0], rel=EXACT)
    assert plan.solver.bound_s == pytest.approx(best[0], rel=EXACT)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "auto"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("graph", [False, True])
def test_every_way_of_searching_heeds_every_hint(graph, name, schedule):
    """Chains and graphs, whichever schedule: the plan keeps to the hint."""
    hints, keeps = CASES[name]
    profile = random_instance(3, partitions=4, workers=3, busy=True, graph=graph)
    try:
        plan = solve(profile, SolveOptions(schedule=schedule, gap=0, **hints)).plan
    except InfeasibleError:
        assert best_plan(profile, keeps=keeps, rules=hints.get("rematerialise", {})) is None
        return
    assert keeps(plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hints_bind_together(schedule):
    """The ladder of 1F1B heeds what the ILP of GPipe heeds, all at once."""
    hints = {"apart": (("p0", "p1"),), "max_workers": 2, "order": ("worker:1", "worker:0", "worker:2")}
    plan = solve(PROFILE, SolveOptions(schedule=schedule, gap=0, **hints)).plan
    assert apart(plan, "p0", "p1")
    assert len(plan.workers) == 2
    assert in_order(plan, ["worker:1/cpu", "worker:0/cpu", "worker:2/cpu"])


def test_marks_count_like_options():
    """What was marked in the model's code, apart and never rematerialised, binds as well."""
    marked = replace(
        PROFILE,
        partitions=tuple(
            replace(each, apart="a" if each.name in ("p0", "p1") else None, rematerialise="always")
            for each in PROFILE.partitions
        ),
    )
    plan = solve(marked, SolveOptions(gap=0)).plan
    assert apart(plan, "p0", "p1")
    assert all(stage.rematerialise == stage.partitions for stage in plan.stages)


def test_a_partial_plan_is_completed():
    """Partitions of the partial plan keep their worker and their remat; the others are placed as is best."""
    part = make_plan(PROFILE, [(2, ["p1"])])
    part = replace(part, stages=(replace(part.stages[0], rematerialise=("p1",)),))
    plan = solve(PROFILE, completing(SolveOptions(gap=0), part, PROFILE)).plan
    assert plan.placement["p1"] == "worker:2/cpu"
    assert "p1" in {name for stage in plan.stages for name in stage.rematerialise}
    assert set(plan.partitions) == set(PROFILE.order)


def test_a_reserve_is_left_free():
    """Memory held in reserve on one worker is not used."""
    tight = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=60e6)
    plan = solve(tight, SolveOptions(reserve={"worker:0": 50e6}, gap=0)).plan
    used = {each.worker: each for each in predict(plan, tight).workers}
    assert "worker:0/cpu" not in used or used["worker:0/cpu"].peak_bytes <= 10e6


def test_patterns_name_many_partitions():
    """`p*` is every partition; a pattern that matches nothing is an error that names some."""
    plan = solve(PROFILE, SolveOptions(pins={"p*": "worker:1"})).plan
    assert plan.workers == ("worker:1/cpu",)
    with pytest.raises(UsageError, match=r"block\.\*") as caught:
        solve(PROFILE, SolveOptions(pins={"block.*": "worker:1"}))
    assert "p0" in caught.value.hint


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({"apart": (("p0", "p1"),), "together": (("p0", "p1"),)}, "kept together"),
        ({"apart": (("p0",),)}, "two or more"),
        ({"order": ("worker:9",)}, "worker:9"),
        ({"order": ("worker:1", "worker:1")}, "twice"),
        ({"only": ("nowhere",)}, "nowhere"),
        ({"reserve": {"nowhere": 1.0}}, "nowhere"),
        ({"rematerialise": {"p0": "never", "p*": "always"}}, "p0"),
        ({"pins": {"p0": "worker:0", "p*": "worker:1"}}, "p0"),
        ({"micro_batches": 3}, "does not divide"),
    ],
)
def test_contradictions_are_told(hints, text):
    """A hint that names what is not there, or contradicts another, is a usage error that says so."""
    with pytest.raises(UsageError, match=text):
        resolve(PROFILE, SolveOptions(**hints))


def test_a_partial_plan_must_agree():
    """A pin that contradicts the plan to complete is an error."""
    part = make_plan(PROFILE, [(2, ["p1"])])
    with pytest.raises(UsageError, match="p1"):
        completing(SolveOptions(pins={"p1": "worker:0"}), part, PROFILE)
    with pytest.raises(UsageError, match="worker:9"):
        completing(SolveOptions(), make_plan(PROFILE, [(9, ["p1"])]), PROFILE)
