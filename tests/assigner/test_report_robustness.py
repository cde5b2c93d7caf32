import json
import math
from dataclasses import replace

import pytest

from assigner.report.robustness import draws_text, robustness_data, robustness_report
from assigner.report.sheet import Line, Sheet, markdown
from assigner.solver.robust.robustness import Robustness
from assigner.solver.robust.spreads import Coverage

FOUND = Robustness(
    objective="step", schedule="auto", max_replicas=None, step_s=0.1, slow_end_s=0.11,
    steps_s=tuple(0.09 + 0.001 * n for n in range(21)),
    regrets=(0.0, 0.01, 0.0, 0.03, 0.082) * 4, asked=21, within=0.02, seed=0,
    coverage=Coverage(48, 48, 14, 13), seconds=2.0,
)  # fmt: skip
NEAR = "within 2.0 % of the best plan found with one stage a worker"


def lines(report):
    return [part.text for part in report if isinstance(part, Line)]


def test_steps_stand_against_the_medians():
    """Medians, slow end and three percentiles in one unit, each with what it is more than the medians."""
    sheet = robustness_report(FOUND)[0]
    assert isinstance(sheet, Sheet)
    assert sheet.columns[1].header == "step ms"
    assert sheet.rows == (
        ("at the medians", "100", "0.0"),
        ("at the slow end: all at their upper quartile", "110", "+10.0"),
        ("5 % of 21 draws are below", "91.0", "-9.0"),
        ("half of 21 draws are below", "100", "0.0"),
        ("95 % of 21 draws are below", "109", "+9.0"),
    )


def test_regrets_stand_against_the_best_plan_found():
    """How many draws, how many near the best, the share, the median and the worst regret."""
    sheet = robustness_report(FOUND)[1]
    assert "against the best plan found" in sheet.title
    assert [column.header for column in sheet.columns][:2] == ["draws solved again", "within 2.0 %"]
    assert sheet.rows == (("20", "12", "60.0", "1.0", "8.2"),)


@pytest.mark.parametrize(
    ("regrets", "text", "tone"),
    [
        ((0.0,) * 20, f"steady: {NEAR} in every one of 20 draws", "strong"),
        (
            (0.0,) * 19 + (0.05,),
            f"steady: {NEAR} in 19 of 20 draws, 5.0 % behind it at worst",
            "strong",
        ),
        (
            FOUND.regrets,
            f"mostly steady: {NEAR} in 12 of 20 draws, 8.2 % behind it at worst",
            "plain",
        ),
        (
            (0.0, 0.0, math.inf),
            f"mostly steady: {NEAR} in 2 of 3 draws, beyond the longest step allowed at worst",
            "plain",
        ),
        ((0.0, 0.1, 0.3), f"hangs on its measurements: {NEAR} in 1 of 3 draws, 30.0 % behind it at worst", "warning"),
    ],
)
def test_one_sentence_says_what_it_means(regrets, text, tone):
    """Nine draws of ten near the best are steady, half of them mostly so; fewer hang on the measurements."""
    assert Line(text, tone) in robustness_report(replace(FOUND, regrets=regrets))


def test_what_the_figures_rest_on_is_said():
    """How many measurements carry a spread, and that the best plans are not proven."""
    found = lines(robustness_report(replace(FOUND, regrets=(0.0,) * 21)))
    assert (
        "48 of 48 measurements and 13 of 14 points of links and collectives carry a spread; the best plan of a draw is"
        " the best one found, without a proof"
    ) in found
    assert not any("time" in text for text in found)
    alone = lines(robustness_report(replace(FOUND, coverage=Coverage(3, 1, 0, 0))))
    assert any(text.startswith("1 of 3 measurements carry a spread;") for text in alone)


def test_draws_that_were_not_done_are_said():
    """A limit that came first is a warning."""
    short = replace(FOUND, asked=100, regrets=FOUND.regrets[:5])
    report = robustness_report(short)
    assert Line("time for 21 of 100 draws", "warning") in report
    assert Line("time to solve 5 of 21 draws again", "warning") in report


def test_without_spreads_nothing_is_claimed():
    """No table and no share: one line says that nothing is known."""
    (line,) = robustness_report(replace(FOUND, coverage=Coverage(48, 0, 14, 0)))
    assert line.tone == "warning"
    assert line.text.startswith(
        "robustness: 0 of 48 measurements and 0 of 14 points of links and collectives carry a spread"
    )


def test_other_objectives_are_named():
    """The regrets are of what the plan was solved for."""
    assert robustness_report(replace(FOUND, objective="cost"))[1].title.startswith("cost against")
    assert robustness_report(FOUND)[1].title.startswith("step time against")


def test_data_is_json_with_every_draw():
    """Every draw is there; a regret without end is null."""
    data = robustness_data(replace(FOUND, regrets=(0.0, math.inf)))
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again == data
    assert (data["regrets"], data["near_best"], data["share"]) == ([0.0, None], 1, 0.5)
    assert data["step_quantiles_s"]["0.5"] == pytest.approx(0.1)
    assert len(data["steps_s"]) == data["priced"] == 21
    assert data["coverage"]["points_spread"] == 13


def test_report_is_text_everywhere():
    """The report can be written as Markdown, too."""
    assert "| at the medians | 100 | 0.0 |" in markdown(robustness_report(FOUND))


def test_progress_is_one_line():
    """Draws done, draws in all, time gone and time in all."""
    assert draws_text(4, 100, elapsed_s=3.2, time_limit=60) == "4 of 100 draws solved again · 3 s of 60 s"
