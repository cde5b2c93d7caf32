from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.formats.solverreport import Baseline, Candidate, SolverReport, WhatIf
from assigner.report.plan import plan_data, plan_report
from assigner.report.sheet import Line, Sheet
from assigner.report.solution import progress_text, proof_lines, solution_data, solution_report
from assigner.report.spread import doubt
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import steady_s
from assigner.schedule.simulate import priced
from assigner.solver import FrontierPoint, Progress, Solution, SolveOptions

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


@pytest.fixture
def plan():
    """A plan with a solver's report, nine candidates and a what-if."""
    plan = priced(make_plan(PROFILE, [(0, ["p0", "p1", "p2"]), (1, ["p3"])], micro_batches=4), PROFILE)
    step = plan.predicted.step_s
    others = tuple(Candidate("gpipe", n, 8 // n, None, 2 * step + n, "proven worse") for n in (1, 2, 8))
    report = SolverReport("HiGHS", "1.0", "optimal", step, 0.99 * step, 0.01, 0.5,
                          SolveOptions().record(), "local search", ("dynamic program",),
                          "plans with one stage a worker")  # fmt: skip
    return replace(
        plan, solver=report, what_if=(WhatIf("link", "twice the bandwidth", step, step),),
        candidates=(*others, Candidate("gpipe", 4, 2, step, step, "chosen"),
                    *(replace(each, schedule="1f1b") for each in others), *others[:2]),
    )  # fmt: skip


def titles(report):
    return [part.title.partition(",")[0] for part in report if isinstance(part, Sheet)]


def lines(report):
    return [part.text for part in report if isinstance(part, Line)]


def test_the_screen_goes_from_the_choice_to_the_verdict(plan):
    """Candidates, the plan, what would change it; the status, its bound and what limits the plan come last."""
    report = solution_report(Solution(plan))
    assert titles(report)[:2] == ["candidates", "2 stages"]
    assert titles(report)[2].startswith("what if")
    status, bound, limit = lines(report)[-3:]
    assert status == (
        "status: optimal to 1.0 % with one stage a worker"
        " (found by local search, proven by dynamic program, with HiGHS 1.0, solved in 500 ms)"
    )
    assert "none of the plans with one stage a worker takes less than" in bound
    assert "limits the plan" in limit


def test_sizes_beyond_the_measured_ones_are_named(plan):
    """What such micro-batches take is no measurement, and the screen says so; within them it says nothing."""
    largest = max(each.micro_batch for each in PROFILE.measurements)

    def told(size):
        made = replace(plan, micro_batch_size=size, workload=replace(plan.workload, batch_size=4 * size))
        found = lines(solution_report(Solution(priced(made, PROFILE)), profile=PROFILE))
        return [each for each in found if "extrapolated" in each]

    assert not told(largest)
    assert f"are 3 times the largest that were measured ({largest})" in told(3 * largest)[0]


def test_long_lists_are_cut_and_the_chosen_one_stays(plan):
    """Of nine candidates the nearest are shown, the chosen one marked in text; with everything all are."""
    short, whole = (solution_report(Solution(plan), everything=all_)[0] for all_ in (False, True))
    assert len(short.rows) < len(whole.rows) == 9
    for sheet in (short, whole):
        (marked,) = sheet.marked
        assert sheet.rows[marked][-1] == "chosen"


def test_only_what_is_not_usual_was_asked_for(plan):
    """Settings at their defaults are not told, others in one line as they are written."""
    assert not any(text.startswith("asked for") for text in lines(solution_report(Solution(plan))))
    asked = SolveOptions(gap=0.02, pins={"p0": "worker:1"}, reserve={"worker:0": 2**31}, apart=(("p0", "p1"),),
                         prices={"kind0": 2.5}, micro_batches=4)  # fmt: skip
    given = replace(plan, solver=replace(plan.solver, options={**asked.record(), "robust": True}))
    assert lines(solution_report(Solution(given)))[0] == (
        "asked for: prices kind0=2.5 · micro batches 4 · pins p0=worker:1 · apart p0,p1 · reserve worker:0=2.00 GiB"
        " · gap 0.02 · robust yes"
    )
    assert any(
        text.startswith("at the slow end of the measurements: found ")
        for text in lines(solution_report(Solution(given)))
    )


def test_the_bound_of_a_cost_is_a_cost(plan):
    """Both figures have their unit, and plans cost it."""
    report = replace(plan.solver, objective_s=5.631e-6, bound_s=5.574e-6)
    told = lines(proof_lines(replace(plan, objective="cost", solver=report)))
    (said,) = [text for text in told if text.startswith("found ")]
    assert said.startswith("found 0.005631 per 1000 samples, none of the ")
    assert said.endswith(" costs less than 0.005574 per 1000 samples")


def test_nothing_proven_names_no_bound(plan):
    """A bound of zero is none."""
    report = replace(plan.solver, bound_s=0.0, gap=1.0, status="feasible")
    assert not any(
        "plan takes less than" in text for text in lines(solution_report(Solution(replace(plan, solver=report))))
    )


def test_data_has_the_plan_and_the_frontier(plan):
    """`--json`: the plan's own document with its candidates and what-ifs, and every point of cost against step."""
    points = (FrontierPoint(1e-4, 0.5, ("worker:0/cpu",), chosen=True),)
    data = solution_data(Solution(plan, points))
    assert len(data["candidates"]) == 9
    assert data["what_if"][0]["what"] == "twice the bandwidth"
    assert data["derived"]["frontier"] == [
        {"money": 1e-4, "step_s": 0.5, "workers": ["worker:0/cpu"], "chosen": True}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("incumbent", "bound", "text"),
    [
        (None, 0.0, "no plan yet · 57 s left · 1/4 decided · gpipe x 8"),
        (0.1, 0.08, "best 100 ms · bound 80.0 ms · gap 20.0 % · 57 s left · 1/4 decided · gpipe x 8"),
        (0.1, float("inf"), "best 100 ms · 57 s left · 1/4 decided · gpipe x 8"),
    ],
)
def test_progress_is_one_line(incumbent, bound, text):
    """A search under way says its incumbent, bound and gap as far as they are known, on 80 columns."""
    found = progress_text(Progress(2.0, "gpipe", 8, incumbent, bound, 1, 4), elapsed_s=3.2, time_limit=60)
    assert found == text
    assert len(found) <= 80


def test_progress_of_what_ifs_says_which():
    """Once the plan is there, what is being priced counts."""
    progress = Progress(2.0, "gpipe", 8, 0.1, 0.08, 1, 4, "pricing what-ifs, 1 of 2: one more worker: kind0")
    found = progress_text(progress, elapsed_s=3.2, time_limit=60)
    assert found == "57 s left · pricing what-ifs, 1 of 2: one more worker: kind0"


def test_what_is_wrong_with_the_profile_stands_beside_the_claim(plan):
    """One line behind the status and its bound, and the same for --json; of a sound profile there is none."""
    measured = tuple(replace(each, starved=0.4) for each in PROFILE.measurements)
    busy = replace(PROFILE, measurements=measured)
    told = doubt(busy)
    report = lines(solution_report(Solution(plan), profile=busy))
    assert report.index(f"warning: {told}") == next(n for n, text in enumerate(report) if "takes less than" in text) + 1
    assert solution_data(Solution(plan), profile=busy)["derived"]["doubt"] == told
    assert solution_data(Solution(plan), profile=PROFILE)["derived"]["doubt"] is None


@pytest.mark.parametrize(("slower", "is_told"), [(2.0, True), (1.1, False)])
def test_a_single_worker_that_shared_its_cores_may_be_faster(plan, slower, is_told):
    """By as much as it was slowed; where the plan is faster even so, nothing is said."""
    crowded = replace(PROFILE, workers=tuple(replace(each, slower=slower) for each in PROFILE.workers))
    plan = replace(plan, baselines=(Baseline("best single worker", 1.2 * plan.predicted.step_s),))
    told = [line for line in lines(solution_report(Solution(plan), profile=crowded)) if "may take as little as" in line]
    assert bool(told) == is_told


@pytest.mark.parametrize(("bandwidth", "schedule", "why"), [
    (2e6, "1f1b", "its warm-ups are short for its wires"),
    (2e6, "gpipe", ""),
    (1e12, "1f1b", ""),
])  # fmt: skip
def test_a_schedule_that_stays_behind_the_steady_state_is_told(plan, bandwidth, schedule, why):
    """And nothing is said where it keeps up, as GPipe does where all are slowest both ways."""
    profile = make_profile(work=[2e-3] * 4, slowness=[1, 1], bandwidth=bandwidth, edge_bytes=4e3)
    held = [(0, ["p0", "p1"]), (1, ["p2", "p3"])]
    behind = replace(make_plan(profile, held, micro_batches=4), schedule=schedule, objective="throughput")
    behind = replace(
        priced(behind, profile),
        solver=replace(plan.solver, objective_s=4 * steady_s(behind, CostModel(profile)), bound_s=0.0, gap=1.0),
    )
    text = " ".join(lines(solution_report(Solution(behind), profile=profile)))
    assert ("one more batch takes" in text) is bool(why)
    assert why in text


def test_show_and_json_say_the_same_of_sharing_and_doubts(plan):
    """What solve says of sharing stages and of doubtful figures, show says, too, and both in JSON."""
    busy = replace(PROFILE, measurements=tuple(replace(each, starved=0.4) for each in PROFILE.measurements))
    derived = solution_data(Solution(plan), profile=busy)["derived"]
    (sharing,), (warning,) = derived["sharing"], derived["warnings"]
    assert sharing.startswith("data parallelism over all 2 workers, which this plan does not use: ")
    assert warning == doubt(busy)
    for report in (solution_report(Solution(plan), profile=busy), plan_report(plan, profile=busy)):
        assert {sharing, f"warning: {warning}"} <= {*lines(report)}
    assert {**plan_data(plan, profile=busy)["derived"], "frontier": [], "doubt": warning} == derived
    assert plan_data(plan)["derived"]["sharing"] == plan_data(plan)["derived"]["warnings"] == []
