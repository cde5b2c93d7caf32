"""The integer program as a file: another solver finds the optimum that `solve` names, and what has none is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import highspy
import pytest
from brute_force import best_plan, random_instance
from builders import make_profile, single

from assigner.errors import UsageError
from assigner.solver import solve
from assigner.solver.export import check_exportable, export_model
from assigner.solver.ilp.linear import Outcome

CASES = [
    {"partitions": 5, "workers": 3, "busy": True, "tight": True, "late_updates": True},
    {"partitions": 5, "workers": 3, "alike": True, "missing": 0.2},
    {"partitions": 4, "workers": 3, "graph": True, "busy": True},
]


def optimum(path) -> float:
    """What HiGHS makes of the file, on its own and with no gap."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    assert solver.readModel(str(path)) == highspy.HighsStatus.kOk
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return solver.getInfo().objective_function_value


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_another_solver_finds_the_same_optimum(tmp_path, case, schedule):
    """Of the file alone, and it is the least step time that brute force finds at that micro-batch count."""
    profile, options = random_instance(2, **case), single(schedule=schedule, gap=0, time_limit=600.0)
    plan = solve(profile, options).plan
    for ending in ("lp", "mps"):
        written = export_model(plan, profile, options, tmp_path / f"model.{ending}")
        found = optimum(written.path) * written.unit_s
        assert written.optimum_s is not None
        assert found == pytest.approx(written.optimum_s, rel=1e-6)
    if not case.get("graph"):
        best = best_plan(profile, schedules=(schedule,), micro_batches=plan.micro_batches)
        assert found == pytest.approx(plan.solver.objective_s, rel=1e-6)
        assert found == pytest.approx(best[0], rel=1e-6)


@pytest.mark.parametrize(("seed", "link"), [(0, 1), (2, 0), (8, 1)])
def test_a_link_that_is_as_good_as_dead_leaves_no_proof_open(tmp_path, seed, link):
    """Of pipelines that take more than the largest coefficient the cuts say so much."""
    profile, options = random_instance(seed, partitions=4, workers=2, graph=True), single(schedule="1f1b", gap=0)
    slow = profile.links[link]
    slow = replace(slow, points=tuple(replace(each, seconds=1e6 * each.seconds) for each in slow.points))
    profile = replace(profile, links=tuple(slow if n == link else each for n, each in enumerate(profile.links)))
    plan = solve(profile, replace(options, micro_batches=1)).plan
    written = export_model(plan, profile, replace(options, micro_batches=1), tmp_path / "model.lp")
    assert written.optimum_s == pytest.approx(plan.solver.objective_s, rel=1e-6)
    assert optimum(written.path) * written.unit_s == pytest.approx(written.optimum_s, rel=1e-6)


def test_the_optimum_is_that_of_the_model_where_the_plan_is_only_within_a_gap(tmp_path):
    """A plan that stops at a wide gap may be worse than the model's optimum, which is told."""
    profile = random_instance(2, partitions=5, workers=3, busy=True, tight=True)
    options = single(schedule="1f1b", gap=0.5)
    plan = solve(profile, options).plan
    written = export_model(plan, profile, options, tmp_path / "model.lp")
    best = best_plan(profile, schedules=("1f1b",), micro_batches=plan.micro_batches)
    assert written.optimum_s == pytest.approx(best[0], rel=1e-6)
    assert optimum(written.path) * written.unit_s == pytest.approx(best[0], rel=1e-6)


def test_a_proof_that_is_not_closed_is_not_claimed(tmp_path, monkeypatch):
    """Where no cut may be added, the file says that its optimum is a lower bound, and it is below the plan."""
    monkeypatch.setattr("assigner.solver.limits.tuning.CLOSE_CUTS", 0)
    profile, options = random_instance(2, partitions=5, workers=3, busy=True), single(schedule="1f1b")
    plan = solve(profile, options).plan
    written = export_model(plan, profile, options, tmp_path / "model.lp")
    assert written.optimum_s is None
    assert "the optimum is a lower bound of the step time" in written.path.read_text()
    assert optimum(written.path) * written.unit_s < plan.solver.objective_s


def test_the_last_bit_that_a_unit_takes_leaves_no_proof_open(tmp_path, monkeypatch):
    """A bound goes through the model's unit and back: where it is below the target by rounding, it has reached it."""
    scaled = Outcome.scaled

    def rounded(outcome, unit):
        found = scaled(outcome, unit)
        return replace(found, bound=math.nextafter(found.bound, 0.0))

    monkeypatch.setattr(Outcome, "scaled", rounded)
    profile, options = random_instance(4, partitions=4, workers=2, graph=True), single(schedule="gpipe", gap=0)
    plan = solve(profile, options).plan
    assert export_model(plan, profile, options, tmp_path / "model.lp").optimum_s is not None


def test_the_file_says_what_its_variables_mean(tmp_path):
    """Groups, positions and what a stage rematerialises, in comments, whatever the names are."""
    profile = random_instance(2, partitions=4, workers=2, tight=True)
    names = {each.name: f"é {each.name}\n" for each in profile.partitions}
    profile = replace(
        profile,
        partitions=tuple(replace(each, name=names[each.name]) for each in profile.partitions),
        measurements=tuple(replace(each, partition=names[each.partition]) for each in profile.measurements),
        edges=tuple(replace(each, source=names[each.source], target=names[each.target]) for each in profile.edges),
    )
    options = single(schedule="1f1b")
    written = export_model(solve(profile, options).plan, profile, options, tmp_path / "model.lp")
    text = written.path.read_text()
    assert f'\\ group 0: "{profile.workers[0].name}"\n' in text
    assert '\\ position 0: "é p0\\n"\n' in text
    assert ': rematerialises "é p0\\n"' in text
    assert optimum(written.path) * written.unit_s == pytest.approx(written.optimum_s, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "throughput"}, "objective throughput"),
        ({"objective": "latency"}, "objective latency"),
        ({"schedule": "interleaved"}, "several stages a worker"),
    ],
)
def test_what_no_integer_program_states_is_refused(tmp_path, options, said):
    """With the way out, before anything is solved."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0])
    with pytest.raises(UsageError, match=said) as caught:
        check_exportable(profile, single(**options), tmp_path / "model.lp")
    assert caught.value.hint


def test_a_model_too_large_or_of_another_ending_is_refused(tmp_path, monkeypatch):
    """The size is known from the profile."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 2.0])
    check_exportable(profile, single(), tmp_path / "model.mps")
    with pytest.raises(UsageError, match=r"\.lp or \.mps"):
        check_exportable(profile, single(), tmp_path / "model.txt")
    monkeypatch.setattr("assigner.solver.limits.tuning.MOST_COLUMNS", 11)
    with pytest.raises(UsageError, match="12 stage options"):
        check_exportable(profile, single(), tmp_path / "model.lp")
    check_exportable(profile, single(together=(("p0", "p1"),)), tmp_path / "model.lp")


def test_the_output_is_guarded(tmp_path):
    """A file that is there stays, but with force."""
    profile, path = random_instance(1, partitions=4, workers=2), tmp_path / "model.lp"
    path.write_text("mine")
    plan = solve(profile, single(schedule="gpipe")).plan
    with pytest.raises(UsageError, match="exists"):
        export_model(plan, profile, single(schedule="gpipe"), path)
    assert path.read_text() == "mine"
    export_model(plan, profile, single(schedule="gpipe"), path, force=True)
    assert "Minimize" in path.read_text()
