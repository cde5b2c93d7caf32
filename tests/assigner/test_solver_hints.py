"""The user's hints bind, and the rest of the plan is the best that they leave."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_plan, make_profile, single
from sweeps import sweep

from assigner.errors import FormatError, InfeasibleError, UsageError
from assigner.schedule.simulate import predict
from assigner.solver import completing, solve
from assigner.solver.problem.hints import resolve

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
@pytest.mark.parametrize("seed", sweep(range(3), quick=2))
def test_each_hint_binds_and_the_rest_is_optimal(seed, name):
    """Exhaustive search over the plans that heed the hint finds none that is faster."""
    hints, keeps = CASES[name]
    profile = random_instance(seed, partitions=4, workers=3, tight=seed % 2 == 0, busy=seed % 3 == 0)
    options = single(schedule="gpipe", gap=0, **hints)
    best = best_plan(profile, keeps=keeps, rules=hints.get("rematerialise", {}))
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(profile, options)
        return
    plan = solve(profile, options).plan
    assert keeps(plan)
    assert plan.solver.objective_s == pytest.approx(best[0], rel=EXACT)
    assert plan.solver.bound_s == pytest.approx(best[0], rel=EXACT)


WAYS = ["1f1b", "gpipe", "interleaved", "auto"]
EVERY_WAY = list(itertools.product((False, True), CASES, WAYS))
PAIRWISE = [((i + j) % 2 > 0, name, way) for i, name in enumerate(CASES) for j, way in enumerate(WAYS)]


@pytest.mark.parametrize(("graph", "name", "schedule"), sweep(EVERY_WAY, quick=PAIRWISE))
def test_every_way_of_searching_heeds_every_hint(graph, name, schedule):
    """Chains and graphs, whichever schedule: the plan keeps to the hint."""
    hints, keeps = CASES[name]
    profile = random_instance(3, partitions=4, workers=3, busy=True, graph=graph)
    try:
        plan = solve(profile, single(schedule=schedule, gap=0, **hints)).plan
    except InfeasibleError:
        assert best_plan(profile, keeps=keeps, rules=hints.get("rematerialise", {})) is None
        return
    assert keeps(plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hints_bind_together(schedule):
    """1F1B heeds what the ILP of GPipe heeds, all at once."""
    hints = {"apart": (("p0", "p1"),), "max_workers": 2, "order": ("worker:1", "worker:0", "worker:2")}
    plan = solve(PROFILE, single(schedule=schedule, gap=0, **hints)).plan
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
    plan = solve(marked, single(gap=0)).plan
    assert apart(plan, "p0", "p1")
    assert all(stage.rematerialise == stage.partitions for stage in plan.stages)


def test_a_partial_plan_is_completed():
    """Partitions of the partial plan keep their worker and their remat; the others are placed as is best."""
    part = make_plan(PROFILE, [(2, ["p1"])])
    part = replace(part, stages=(replace(part.stages[0], rematerialise=("p1",)),))
    plan = solve(PROFILE, completing(single(gap=0), part, PROFILE)).plan
    assert plan.placement["p1"] == "worker:2/cpu"
    assert "p1" in {name for stage in plan.stages for name in stage.rematerialise}
    assert set(plan.partitions) == set(PROFILE.order)


def test_a_reserve_is_left_free():
    """Memory held in reserve on one worker is not used."""
    tight = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=60e6)
    plan = solve(tight, single(reserve={"worker:0": 50e6}, gap=0)).plan
    used = {each.worker: each for each in predict(plan, tight).workers}
    assert "worker:0/cpu" not in used or used["worker:0/cpu"].peak_bytes <= 10e6


def test_patterns_name_many_partitions():
    """`p*` is every partition; a pattern that matches nothing is an error that names some."""
    plan = solve(PROFILE, single(pins={"p*": "worker:1"})).plan
    assert plan.workers == ("worker:1/cpu",)
    with pytest.raises(UsageError, match=r"block\.\*") as caught:
        solve(PROFILE, single(pins={"block.*": "worker:1"}))
    assert "p0" in caught.value.hint


def test_the_narrower_of_two_pins_that_agree_binds():
    """A worker on a host that a pattern names; in any order, and where a partial plan says the worker."""
    profile = replace(PROFILE, workers=tuple(replace(each, host="rack") for each in PROFILE.workers))
    narrow, wide = {"p0": "worker:1/cpu"}, {"p*": "rack"}
    for pins in ({**narrow, **wide}, {**wide, **narrow}):
        assert resolve(profile, single(pins=pins))[1].pins["p0"] == "worker:1/cpu"
    with pytest.raises(UsageError, match="pinned to"):
        resolve(profile, single(pins={"p*": "worker:1", "p0": "worker:0"}))


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({"apart": (("p0", "p1"),), "together": (("p0", "p1"),)}, "kept together"),
        ({"apart": (("p0",),)}, "two or more"),
        ({"order": ("worker:9",)}, "worker:9"),
        ({"order": ("worker:1", "worker:1")}, "twice"),
        ({"order": ("worker:1", "worker:1/cpu")}, "the first time as 'worker:1'"),
        ({"only": ("nowhere",)}, "nowhere"),
        ({"only": ("worker:1",), "order": ("worker:0", "worker:2")}, "only worker:1/cpu may"),
        ({"reserve": {"nowhere": 1.0}}, "nowhere"),
        ({"rematerialise": {"p0": "never", "p*": "always"}}, "p0"),
        ({"pins": {"p0": "worker:0", "p*": "worker:1"}}, "p0"),
        ({"micro_batches": 5}, "5 is not allowed: training cuts a batch of 8 into 4"),
    ],
)
def test_contradictions_are_told(hints, text):
    """A hint that names what is not there, or contradicts another, is a usage error that says so."""
    with pytest.raises(UsageError, match=text):
        resolve(PROFILE, single(**hints))


def test_a_partial_plan_must_agree():
    """A pin that contradicts the plan to complete is an error."""
    part = make_plan(PROFILE, [(2, ["p1"])])
    with pytest.raises(UsageError, match="p1"):
        completing(single(pins={"p1": "worker:0"}), part, PROFILE)


@pytest.mark.parametrize(
    ("stage", "text"),
    [((9, ["p1"]), r"stages\[1\]: the plan names 'worker:9/cpu'"), ((1, ["q1"]), r"stages\[1\]: the plan names 'q1'")],
)
def test_a_partial_plan_names_what_the_profile_has(stage, text):
    """An unknown worker or partition is a file that does not fit, and no hint of anybody's."""
    part = make_plan(PROFILE, [(0, ["p0"]), stage])
    with pytest.raises(FormatError, match=text):
        completing(single(), part, PROFILE)


def test_a_partial_plan_of_another_workload_is_refused():
    """Where it has a fingerprint, that is the profile's; one that was written by hand may have none."""
    known = replace(PROFILE, workload=replace(PROFILE.workload, fingerprint="sha256:a"))
    part = make_plan(known, [(2, ["p1"])])
    assert completing(single(), part, known).pins == {"p1": "worker:2/cpu"}
    none = replace(part, workload=replace(part.workload, fingerprint=""))
    assert completing(single(), none, known).pins == {"p1": "worker:2/cpu"}
    other = replace(part, workload=replace(part.workload, fingerprint="sha256:b"))
    with pytest.raises(FormatError, match=r"workload .*sha256:b.*, the profile of .*sha256:a"):
        completing(single(), other, known)


def test_a_forbidden_worker_holds_no_such_partition():
    """By name, rank, kind or host, of a pattern, several times; baselines keep to it, too."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 2.0])
    forbid = (("p[01]", "worker:0"), ("p0", "kind1"), ("p3", "host2"))
    options = single(forbid=forbid, micro_batches=4)
    plan = solve(profile, options).plan
    assert plan.placement["p0"] == "worker:2/cpu"
    assert plan.placement["p1"] != "worker:0/cpu"
    assert plan.placement["p3"] != "worker:2/cpu"
    alone = next(each for each in plan.baselines if each.name == "best single worker")
    assert alone.step_s is None
    assert plan.solver.options["forbid"] == [list(pair) for pair in forbid]


def test_a_plan_holds_no_more_than_the_memory_allowed():
    """A cap counts beside what is left free, and never gives a worker more than it has."""
    profile = make_profile(work=[1e-3] * 6, slowness=[1.0, 4.0], capacity=1e9)
    free = solve(profile, single(micro_batches=8)).plan
    most = next(each.peak_bytes for each in free.predicted.workers if each.worker == "worker:0/cpu")
    plan = solve(profile, single(micro_batches=8, memory={"worker:0": 0.6 * most}, reserve={"kind0": 1e8})).plan
    held = {each.worker: each for each in plan.predicted.workers}
    assert held["worker:0/cpu"].peak_bytes <= 0.6 * most == pytest.approx(held["worker:0/cpu"].capacity_bytes)
    resolved, _ = resolve(profile, single(memory={"worker:1": 1e12}))
    assert resolved.worker["worker:1/cpu"].memory_bytes == 1e9


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"pins": {"p00": "worker:0"}}, "p0"),
        ({"pins": {"p0": "wroker:0"}}, "worker:0"),
        ({"forbid": (("p0", "host7"),)}, "host"),
        ({"memory": {"worker1": 1e9}}, "worker:1"),
        ({"reserve": {"knid1": 1e9}}, "kind1"),
    ],
)
def test_a_name_that_is_nearly_one_of_the_profile_is_asked_about(options, meant):
    with pytest.raises(UsageError) as caught:
        resolve(PROFILE, single(**options))
    assert caught.value.hint.startswith("did you mean ")
    assert meant in caught.value.hint


def test_a_pin_to_a_forbidden_worker_is_refused():
    with pytest.raises(UsageError, match="pinned to 'worker:1'"):
        resolve(PROFILE, single(pins={"p0": "worker:1"}, forbid=(("p*", "host1"),)))


def test_a_ways_out_drops_what_can_be_pasted():
    """Names with a star stand in quotes, so that the shell leaves them alone; caps and forbidden workers are told."""
    options = single(forbid=(("p*", "worker:0"), ("p*", "worker:1"), ("p*", "worker:2")))
    with pytest.raises(InfeasibleError) as caught:
        solve(PROFILE, options)
    assert "forbidden on worker:0, worker:1, worker:2" in caught.value.message
    assert "drop --forbid 'p*=worker:" in caught.value.hint
    with pytest.raises(InfeasibleError) as caught:
        solve(PROFILE, single(memory={f"worker:{n}": 1e6 for n in range(3)}))
    assert any("--memory worker:" in way.how for way in caught.value.ways_out)


def test_a_plan_edited_by_hand_with_a_wrong_name_is_asked_about():
    plan = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p33"])])
    with pytest.raises(FormatError) as caught:
        predict(plan, PROFILE)
    assert caught.value.hint == "did you mean p3?"
    far = make_plan(PROFILE, [(7, ["p0", "p1", "p2", "p3"])])
    with pytest.raises(FormatError, match="worker:7/cpu") as caught:
        predict(far, PROFILE)
    assert "did you mean worker:" in caught.value.hint
