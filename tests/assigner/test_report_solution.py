import pytest
from builders import make_plan, make_profile

from assigner.report.sheet import Line, Sheet
from assigner.report.solution import candidates, progress_text, solution_report
from assigner.simulate import priced
from assigner.solver import Candidate, Progress, Solution

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


@pytest.fixture
def solution():
    plan = priced(make_plan(PROFILE, [(0, ["p0", "p1", "p2"]), (1, ["p3"])], micro_batches=4), PROFILE)
    found = (
        Candidate("gpipe", 1, 8, None, float("inf"), "infeasible: p0 needs 19.4 GiB"),
        Candidate("gpipe", 4, 2, plan.predicted.step_s, plan.predicted.step_s, "chosen"),
        Candidate("gpipe", 8, 1, None, 0.0, "not decided"),
    )
    return Solution(plan=plan, candidates=found, limiting="worker:0/cpu limits the plan")


def test_chosen_candidate_is_marked_in_text(solution):
    """The row of the plan says `chosen` and stands out; what is not known is a dash."""
    (sheet,) = candidates(solution)
    assert sheet.marked == {1}
    assert sheet.rows[1][-1] == "chosen"
    assert sheet.rows[0][3:5] == sheet.rows[2][3:5] == ("-", "-")


def test_report_has_stages_candidates_and_the_limit(solution):
    """What `solve` prints has the plan's stages, the candidates and what limits it, once."""
    parts = solution_report(solution)
    assert [part.title for part in parts if isinstance(part, Sheet)] == ["2 stages", "candidates"]
    assert parts[-1] == Line("worker:0/cpu limits the plan")


@pytest.mark.parametrize(
    ("incumbent", "bound", "text"),
    [
        (None, 0.0, "gpipe, 8 micro-batches · no plan yet · 1 of 4 candidates decided · 3 s of 60 s"),
        (
            0.1,
            0.08,
            (
                "gpipe, 8 micro-batches · best 100 ms · bound 80.0 ms · gap 20.0 %"
                " · 1 of 4 candidates decided · 3 s of 60 s"
            ),
        ),
        (0.1, float("inf"), "gpipe, 8 micro-batches · best 100 ms · 1 of 4 candidates decided · 3 s of 60 s"),
    ],
)
def test_progress_is_one_line(incumbent, bound, text):
    """A search under way says its incumbent, bound and gap as far as they are known."""
    assert progress_text(Progress(2.0, "gpipe", 8, incumbent, bound, 1, 4), elapsed_s=3.2, time_limit=60) == text
