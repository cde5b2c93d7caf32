"""The table of ways out."""

from __future__ import annotations

import pytest

from assigner.errors import InfeasibleError, WayOut
from assigner.report.whatif import ways_out_report


def test_a_row_for_each_way_out_and_a_line_for_what_was_not_tried():
    """What changes, how, and the step time, whose unit is in the header; the cheapest one is marked in text."""
    ways = (WayOut("remat auto instead of never", "--remat auto", 0.0125), WayOut("fewer", "--batch-size 4", 0.25))
    sheet, line = ways_out_report(InfeasibleError("no", ways_out=ways, untried=("more memory", "one more worker")))
    assert [column.header for column in sheet.columns] == ["what changes", "how", "step ms"]
    assert sheet.rows == (
        ("remat auto instead of never (cheapest)", "--remat auto", "12.5"), ("fewer", "--batch-size 4", "250"),
    )  # fmt: skip
    assert sheet.marked == {0}
    assert line.text == "not known, for the time was over: more memory, one more worker"


def test_nothing_to_tell_is_no_report():
    """An error without ways out prints nothing below itself."""
    assert ways_out_report(InfeasibleError("no")) == ()


@pytest.mark.parametrize(
    ("objective", "title", "header", "cell"),
    [
        ("step", "with this step or a shorter one", "step ms", "12.5"),
        ("throughput", "with this steady batch or a shorter one", "steady batch ms", "12.5"),
        ("latency", "with this forward or a shorter one", "forward ms", "12.5"),
        ("cost", "at this cost or less", "per 1000 samples", "12.5"),
    ],
)
def test_a_value_is_told_as_what_it_is(objective, title, header, cell):
    """By the objective that was asked for; a way out that asks for another one has no value to compare."""
    ways = (WayOut("more", "--max-workers 2", 0.0125, objective), WayOut("other", "--objective step", 0.01, "none"))
    (sheet,) = ways_out_report(InfeasibleError("no", ways_out=ways))
    assert sheet.title == f"with one of these changes there is a plan, {title}"
    assert sheet.columns[-1].header == header
    assert [row[-1] for row in sheet.rows] == [cell, "-"]
