"""The table of ways out."""

from __future__ import annotations

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
