"""What-ifs and candidates of a plan."""

from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_plan, make_profile

from assigner.formats.plan import ProfileReference
from assigner.formats.solverreport import Candidate, SolverReport, WhatIf
from assigner.report.plan import candidates
from assigner.report.whatif import proven, solve_flags, what_if, what_if_data, what_if_hint
from assigner.schedule.simulate import priced
from assigner.solver import SolveOptions

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])
PLAN = priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), PROFILE)
STEP = PLAN.predicted.step_s


def solved(*, name="HiGHS", profile=None, **options):
    """A plan as a search for a short step leaves it."""
    solver = SolverReport(name, "1.0", "optimal", STEP, STEP, 0.0, 0.1, options)
    return replace(PLAN, profile=profile, solver=solver)


MORE = WhatIf("micro_batches", "9 micro-batches", STEP * 0.98, STEP * 0.98)
WORKER = WhatIf("worker", "one more kind0", STEP / 1.25, STEP / 1.5)
LINK = WhatIf("link", "worker:0/cpu -> worker:1/cpu twice as wide", STEP, STEP)
NONE = WhatIf("worker", "one more kind1", None, None)


def test_each_change_has_its_gain_and_its_proof():
    """Step, beside the plan's, and bound; the one that gains most is named, and what fits nowhere says so."""
    (sheet,) = what_if(replace(PLAN, what_if=(MORE, WORKER, LINK, NONE)))
    assert [row[0] for row in sheet.rows] == [MORE.what, f"{WORKER.what} (gains most)", LINK.what, NONE.what]
    assert [row[2] for row in sheet.rows] == ["0.98x", "0.80x", "1.00x", "-"]
    assert [row[3] for row in sheet.rows[::2]] == ["proven", "proven"]
    assert float(sheet.rows[1][3]) == pytest.approx(1000 * STEP / 1.5, rel=0.01)
    assert sheet.rows[3][1:] == ("-", "-", "nothing fits")
    assert sheet.marked == {1}


def test_what_gains_nothing_is_not_marked():
    """Where no change helps none gains most."""
    (sheet,) = what_if(replace(PLAN, what_if=(LINK, NONE)))
    assert not sheet.marked
    assert not any("most" in row[0] for row in sheet.rows)


def test_a_bound_proves_a_step():
    """Proven: no shorter step is possible after the change."""
    assert proven(MORE)
    assert not proven(WORKER)
    assert not proven(NONE)


def test_without_what_ifs_a_line_says_how_to_get_them():
    """The command names the profile where it is now, not where it was when the plan was solved."""
    assert what_if(PLAN) == ()
    known = solved(profile=ProfileReference("p.json", "00"))
    assert what_if_hint(known)[0].text.endswith(": assigner solve PROFILE -o PLAN --what-if")
    told = what_if_hint(known, source=Path("some dir/p.json"))[0].text
    assert told.endswith(": assigner solve 'some dir/p.json' -o PLAN --what-if")
    assert what_if_hint(replace(known, what_if=(MORE,))) == ()


def test_the_command_asks_for_what_the_plan_was_asked_for():
    """Every option that is not at its default is in it, ready for a shell; what `solve` does not know is left out."""
    options = SolveOptions(
        schedule="1f1b", micro_batches=4, pins={"p[01]": "worker:0"}, together=(("p0", "p1"),),
        only=("kind0", "worker:1"), rematerialise={"p2": "always"}, gap=0.05,
    )  # fmt: skip
    (line,) = what_if_hint(solved(**options.record()))
    asked = "--schedule 1f1b --micro-batches 4 --pin 'p[01]=worker:0' --together p0,p1 --always-remat p2"
    assert line.text.endswith(f"-o PLAN {asked} --only kind0 --only worker:1 --gap 0.05 --what-if")
    assert solve_flags(SolveOptions().record()) == ()
    assert solve_flags({"gap": None, "pins": 3, "together": [1], "what": "ever", "seed": 1}) == ("--seed 1",)


def test_plans_that_the_command_would_not_serve():
    """A simple placement, another objective, a robust plan, one by hand, and one whose what-ifs are all priced."""
    assert what_if_hint(PLAN) == ()
    assert what_if_hint(replace(solved(), objective="throughput")) == ()
    assert what_if_hint(solved(name="equal split")) == ()
    assert what_if_hint(solved(robust=True)) == ()
    assert what_if_hint(solved(what_if=True, what_if_left_out=0)) == ()
    assert what_if_hint(solved(what_if=True, what_if_left_out=2))


def test_json():
    """Every field with the speed-up and whether it is proven."""
    data = what_if_data(replace(PLAN, what_if=(WORKER, NONE)))
    assert data[0]["speed_up"] == pytest.approx(1.25)
    assert data[0]["proven"] is False
    assert data[1]["speed_up"] is None


def candidate(n, value, status="proven worse"):
    return Candidate("gpipe", n, 8 // n, value, None if value is None else value / 2, status)


def test_few_candidates_are_those_nearest_to_the_chosen_one():
    """The chosen one is always there, the order is the search's, and the title says how many there are."""
    found = (candidate(1, 9.0), candidate(2, 4.0, "chosen"), candidate(4, 5.0), candidate(8, None))
    plan = replace(PLAN, candidates=found)
    (sheet,) = candidates(plan, most=2)
    assert [(row[1], row[-1]) for row in sheet.rows] == [("2 x 4", "chosen"), ("4 x 2", "proven worse")]
    assert "the 2 nearest of 4" in sheet.title
    assert sheet.marked == {0}
    (whole,) = candidates(plan)
    assert [row[2] for row in whole.rows] == ["9.00", "4.00", "5.00", "-"]
    assert [row[3] for row in whole.rows] == ["4.50", "2.00", "2.50", "-"]
    assert candidates(PLAN) == ()
