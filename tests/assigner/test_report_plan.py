from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_plan, make_profile

from assigner.formats.solverreport import Baseline, SolverReport, WhatIf
from assigner.report.memory import fullness
from assigner.report.plan import (
    ROW_LIMIT,
    baselines,
    best_baseline,
    bottleneck,
    describe_solver,
    gain_line,
    plan_data,
    plan_report,
    proven_gap,
    remat_text,
    speed_up,
    stages,
    status,
)
from assigner.report.sheet import Line, Sheet
from assigner.report.whatif import what_if
from assigner.schedule.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


@pytest.fixture
def plan():
    return priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (0, ["p3"])]), PROFILE)


def report(gap, kind="optimal"):
    return SolverReport("HiGHS", "1.0", kind, 1.0, 1 - gap, gap, 0.5)


def of_step(found, step_s):
    """The same report of a plan whose objective is this step."""
    return replace(found, objective_s=step_s, bound_s=(1 - found.gap) * step_s)


@pytest.mark.parametrize(
    ("gap", "text"),
    [(0.0, "optimal"), (1e-4, "optimal"), (0.018, "optimal to 1.8 %"), (1.0, "feasible: nothing proven")],
)
def test_status_says_what_is_proven(gap, text):
    """A gap that is none is called optimal, another is told, and no bound is no proof."""
    assert text in status(report(gap))


@pytest.mark.parametrize(
    ("schedule", "scope"),
    [
        ("auto", "with one stage a worker"),
        ("1f1b", "with one stage a worker under 1f1b"),
        ("interleaved", "interleaved"),
    ],
)
@pytest.mark.parametrize("gap", [0.0, 0.018])
def test_status_says_among_which_plans_it_is_proven(schedule, scope, gap):
    """A bound holds for the plans that were searched: whoever reads it must not take it for one of all plans."""
    asked = {"schedule": schedule}
    for kind in ("optimal", "feasible"):
        assert scope in status(replace(report(gap, kind), options=asked))
    assert status(replace(report(1.0), options=asked)) == "feasible: nothing proven"


def test_the_status_of_the_file_and_of_the_screen_are_one_word():
    for kind in ("optimal", "feasible"):
        assert status(report(0.018, kind)).startswith(kind)


def test_stop_by_a_limit_is_said():
    """A search that the time limit or the user stopped says so beside its status; one that ended by itself does not."""
    ended = report(0.1, "feasible")
    late = replace(ended, options={"time_limit": ended.seconds})
    assert "stopped by the time limit" in describe_solver(late)
    assert "interrupted" in describe_solver(replace(ended, interrupted=True))
    assert "stopped" not in describe_solver(replace(ended, options={"time_limit": 10 * ended.seconds}))
    assert "stopped" not in describe_solver(report(0.1))


def test_worker_with_two_stages_is_counted_once(plan):
    """A worker's times stand at its first stage; its second stage leaves them out."""
    rows = stages(plan).rows
    assert [row[1] for row in rows] == ["worker:0/cpu", "worker:1/cpu", "worker:0/cpu"]
    assert rows[0][5]
    assert rows[2][5:] == ("",) * 6


def test_speed_up_is_over_the_best_baseline_that_fits(plan):
    """Baselines that do not fit play no part, and the best of the others is the measure."""
    step = plan.predicted.step_s
    rated = replace(plan, baselines=(Baseline("a", None), Baseline("b", 3 * step), Baseline("c", 2 * step)))
    assert best_baseline(rated) == ("c", 2 * step)
    assert speed_up(rated) == pytest.approx(2)
    assert gain_line(rated).text == "2.00x as fast as the best baseline (c)"
    assert "none of the baselines fits" in gain_line(replace(plan, baselines=(Baseline("a", None),))).text
    assert gain_line(replace(plan, baselines=(Baseline("c", step),))).text.startswith("as fast as")


def test_remat_text():
    """None is a dash, every partition is `all`, else their names."""
    names = ["b.0", "b.1", "b.2", "b.3"]
    assert remat_text(names, []) == "-"
    assert remat_text(names, names) == "all"
    assert remat_text(names, ["b.3", "b.1", "b.2"]) == "b.1-3 (3)"


def test_overfull_memory_is_visible(plan):
    """A peak above the capacity is a share above 1, and an exclamation mark says so."""
    worker = replace(plan.predicted.workers[0], peak_bytes=3e9, capacity_bytes=2e9)
    assert fullness(worker) == 1.5
    over = replace(plan, predicted=replace(plan.predicted, workers=(worker, *plan.predicted.workers[1:])))
    assert stages(over).rows[0][8] == "150.0 !"


def test_unpriced_plan_has_rows_without_times(plan):
    """Without a prediction every stage is still listed, with what the plan decides and no empty columns."""
    sheet = stages(replace(plan, predicted=None))
    assert len(sheet.rows) == 3
    assert [column.header for column in sheet.columns] == ["#", "worker", "partitions", "remat", "in flight"]
    assert plan_data(replace(plan, predicted=None))["derived"]["speed_up"] is None


def test_a_stage_is_one_short_line():
    """Of many unlike partitions the first and the last are named, what both begin with once; -v names all."""
    names = ["layers.0.norm", "layers.0.mlp", "layers.1.norm", "layers.1.mlp"]
    profile = make_profile(work=[1e-3] * 4, slowness=[1])
    renamed = dict(zip(profile.partition, names, strict=True))
    plan = make_plan(profile, [(0, list(renamed))])
    stage = replace(plan.stages[0], partitions=tuple(names), rematerialise=tuple(names[:3]))
    plan = replace(plan, stages=(stage,))
    assert stages(plan).rows[0][2:4] == ("layers.0.norm ... 1.mlp (4)", "3 of 4")
    assert "-v names every partition" in stages(plan).title
    assert stages(plan, everything=True).rows[0][2] == ", ".join(names)
    assert "-v" not in stages(plan, everything=True).title


def test_what_if_and_baselines_are_held_against_the_plan_alike(plan):
    """Half the plan's step is 0.50x in both tables, under one heading."""
    half = plan.predicted.step_s / 2
    sheets = (*what_if(replace(plan, what_if=(WhatIf("link", "wider", half, half),))),
              *baselines(replace(plan, baselines=(Baseline("simple", half),))))  # fmt: skip
    found = [dict(zip((each.header for each in part.columns), part.rows[0], strict=True)) for part in sheets[:2]]
    assert [row["to this plan"] for row in found] == ["0.50x", "0.50x"]


def test_few_baselines_on_a_screen(plan):
    """The fastest are kept in their order, and the title says how many there are."""
    step = plan.predicted.step_s
    slower = (Baseline(f"b{n}", step * (9 - n)) for n in range(6))
    many = replace(plan, baselines=(*slower, Baseline("x", None)))
    sheet = baselines(many, most=2)[0]
    assert [row[0] for row in sheet.rows] == ["b4", "b5 (best of these)"]
    assert "the 2 fastest of 7" in sheet.title
    assert len(baselines(many)[0].rows) == 7


def test_the_screen_has_every_part(plan):
    """Stages, bottleneck, clock, memory, and how to get the what-ifs; the same in --json."""
    plan = replace(plan, solver=of_step(report(0.0), plan.predicted.step_s))
    parts = plan_report(plan, profile=PROFILE, source=Path("p.json"))
    titles = [part.title for part in parts if not isinstance(part, Line)]
    assert [title.split()[0].rstrip(":") for title in titles] == ["3", "clock", "peak"]
    said = [part.text for part in parts if isinstance(part, Line)]
    assert any(text.startswith("worker:0/cpu limits the plan") for text in said)
    assert said[-1].startswith("what more workers or wider links would bring: assigner solve p.json -o PLAN")
    data = plan_data(plan, profile=PROFILE)["derived"]
    assert data["bottleneck"] in said
    assert data["clock"]["exact"]
    assert data["memory_bytes"]["worker:1/cpu"]["parameters"] == 1e6
    assert isinstance(parts[2], Sheet)


@pytest.mark.parametrize("options", [{}, {"proven_by": None, "time_limit": "x"}])
def test_odd_options_are_no_bug(options):
    """A file's settings may be anything: the status is told all the same."""
    assert "optimal" in describe_solver(replace(report(0.0), options=options))


def test_a_faster_baseline_is_told_without_a_cause(plan):
    """By how much, and what may help; not where the plan's schedule is that already."""
    step = plan.predicted.step_s
    slower = replace(plan, baselines=(Baseline("a", step / 2),))
    assert gain_line(slower).text.startswith("a is faster by 50.0 %; where it")
    assert "may find" in gain_line(slower).text
    assert gain_line(replace(slower, schedule="interleaved")).text == "a is faster by 50.0 %"
    shared = replace(slower, baselines=(Baseline("data parallel", step / 2),))
    assert gain_line(shared).text.endswith("without --max-replicas 1 workers may share a stage, as they do there")
    for asked, outside in (("gpipe", True), ("auto", False)):
        options = {"schedule": asked, "max_replicas": 2}
        line = gain_line(replace(shared, solver=replace(report(0.0), options=options))).text
        assert line.endswith("--schedule gpipe searches no such plans" if outside else "faster by 50.0 %")


def test_a_plan_of_another_objective_is_not_held_against_baselines(plan):
    """They are placed for a short step, which the title says; there is no speed-up, no best, no gain."""
    rated = replace(plan, objective="cost", baselines=(Baseline("a", plan.predicted.step_s / 2),))
    (sheet,) = baselines(rated)
    assert [column.header for column in sheet.columns][1:] == ["step ms"]
    assert sheet.rows[0][0] == "a"
    assert sheet.title == "baselines, placed for a short step and not for cost"
    assert plan_data(rated)["derived"]["speed_up"] is None


def test_a_gap_is_of_the_step_that_is_shown(plan):
    """None where nothing is proven, of another objective, or of another step than the predicted one."""
    step = plan.predicted.step_s
    solved = replace(plan, solver=of_step(report(0.02), step))
    assert proven_gap(solved) == 0.02
    assert proven_gap(plan) is None
    assert proven_gap(replace(solved, solver=replace(solved.solver, gap=1.0))) is None
    assert proven_gap(replace(solved, objective="latency")) is None
    assert proven_gap(replace(solved, predicted=replace(solved.predicted, step_s=2 * step))) is None
    robust = replace(solved.solver, objective_s=2 * step, options={"robust": True})
    assert proven_gap(replace(solved, solver=robust)) == 0.02, "its objective is at the slow end"


def test_notes_stand_below_the_headline(plan):
    """Why the figures are not the file's; a plan whose figures were left out is not called unpriced besides."""
    said = [part.text for part in plan_report(replace(plan, predicted=None), notes=["it does not hold"])[:3]
            if isinstance(part, Line)]  # fmt: skip
    assert said[-1] == "it does not hold"
    assert not any("not priced" in text for text in said)
    assert plan_data(plan, notes=["x"])["derived"]["notes"] == ["x"]


def test_hosts_stand_beside_workers_where_there_are_several(plan):
    """In every table of workers; on one host, or without the profile, there is nothing to tell."""
    apart = replace(PROFILE, workers=tuple(replace(each, host=f"box{n}") for n, each in enumerate(PROFILE.workers)))
    named = [part for part in plan_report(plan, profile=apart) if isinstance(part, Sheet)
             and any(column.header == "worker" for column in part.columns)]  # fmt: skip
    assert len(named) == 2
    for sheet in named:
        at = [column.header for column in sheet.columns].index("host")
        assert {(row[at - 1], row[at]) for row in sheet.rows} == {("worker:0/cpu", "box0"), ("worker:1/cpu", "box1")}
    one = replace(PROFILE, workers=tuple(replace(each, host="box") for each in PROFILE.workers))
    for profile in (one, None):
        alone = [part for part in plan_report(plan, profile=profile) if isinstance(part, Sheet)]
        assert not any(column.header == "host" for sheet in alone for column in sheet.columns)


def test_of_many_rows_the_first_and_the_last_are_shown():
    """The title says how many more there are, and -v shows all."""
    count = ROW_LIMIT + 36
    many = make_profile(work=[1e-3] * count, slowness=[1] * count, links=False)
    long = make_plan(many, [(n, [f"p{n}"]) for n in range(count)])
    sheet, whole = stages(long), stages(long, everything=True)
    half = ROW_LIMIT // 2
    assert sheet.title == f"{count} stages (the first and the last {half} rows; -v lists 36 more)"
    assert [row[0] for row in sheet.rows] == [str(n) for n in (*range(half), *range(count - half, count))]
    assert (whole.title, len(whole.rows)) == (f"{count} stages", count)


def test_the_longest_steps_are_not_gone_through_again(monkeypatch):
    """What limits such a plan is told by its prediction alone."""
    plan = priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])], micro_batches=4), PROFILE)
    monkeypatch.setattr("assigner.report.clock.LONGEST", 2 * 4 * 2 - 1)
    monkeypatch.setattr("assigner.report.plan.simulated", None)
    (line,) = bottleneck(plan, PROFILE)
    assert "limits the plan" in line.text
