"""The table of a step's messages."""

from __future__ import annotations

from builders import make_plan, make_profile

from assigner.report.links import transfers
from assigner.report.sheet import Line, Sheet
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import simulated, summary

PROFILE = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0, 1.0])
COST = CostModel(PROFILE)
TIMELINE = simulated(make_plan(PROFILE, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])], micro_batches=4), COST)
NOW = summary(TIMELINE, COST)


def test_each_link_with_what_it_carries() -> None:
    """A row for each link; with the program also what its messages are, and how many a step has."""
    (sheet,) = transfers(NOW, TIMELINE.program)
    assert isinstance(sheet, Sheet)
    found = {row[:2]: row[2:4] for row in sheet.rows}
    assert len(found) == len(NOW.transfers) == 4
    assert found["worker:0/cpu", "worker:1/cpu"] == ("activation of p0", "4")
    assert found["worker:2/cpu", "worker:1/cpu"] == ("gradient of p1", "4")
    assert len(transfers(NOW)[0].rows[0]) == len(sheet.rows[0]) - 2


def test_the_busiest_links_alone() -> None:
    """Those beyond the wanted number are counted."""
    sheet, rest = transfers(NOW, most=1)
    assert len(sheet.rows) == 1
    assert isinstance(rest, Line)
    assert "3 links" in rest.text


def test_nothing_is_sent() -> None:
    """One worker has no table."""
    alone = simulated(make_plan(PROFILE, [(0, ["p0", "p1", "p2"])]), COST)
    assert transfers(summary(alone, COST), alone.program) == ()
