"""The measured all-reduces of a profile in a table, for --json and on the report's page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.formats.profile import Collective, LinkPoint, Profile
from assigner.report.links import ROW_LIMIT, collectives
from assigner.report.page.document import page_html
from assigner.report.page.shown import shown
from assigner.report.profile import profile_data, profile_report
from assigner.report.sheet import Sheet


def reduced(profile: Profile, *ranks: int, seconds: float = 40e-3, **more: object) -> Collective:
    """At a size whose ring formula takes 10.1 ms * 2 (r - 1): messages of 10 MB at 1 GB/s."""
    names = tuple(profile.workers[rank].name for rank in ranks)
    return Collective(names, (LinkPoint(1e7 * len(ranks), seconds, 9, 0.03),), **more)  # type: ignore[arg-type]


def with_some(*sets: tuple[int, ...], workers: int = 3, links: bool = True) -> Profile:
    made = make_profile(work=[1e-3] * 2, slowness=[1.0] * workers, links=links)
    return replace(made, collectives=tuple(reduced(made, *ranks, busy=0.25) for ranks in sets))


def sheet(profile: Profile, **more: bool) -> Sheet:
    (found,) = collectives(profile, **more)
    assert isinstance(found, Sheet)
    return found


def test_each_set_is_a_row_with_its_distance_from_the_formula() -> None:
    """Smaller sets first; sizes that a set lacks stay empty; at 80 columns names and times are there."""
    found = sheet(with_some((0, 1, 2), (0, 1)))
    assert [each.header for each in found.columns] == [
        "among",
        "by",
        "19.1 MiB ms",
        "28.6 MiB ms",
        "± %",
        "ring",
        "busy %",
    ]
    pair, everybody = found.rows
    assert pair == ("worker:0/cpu, worker:1/cpu", "gloo", "40.0", "-", "3.0", f"{40e-3 / (2 * 10.1e-3):.2f}x", "25.0")
    assert everybody == ("worker:0-2/cpu (3)", "gloo", "-", "40.0", "3.0", f"{40e-3 / (4 * 10.1e-3):.2f}x", "25.0")
    assert {"among", "28.6 MiB ms", "busy %"} <= {each.header for each in found.fitted(80).columns}


def test_without_links_there_is_nothing_to_compare_with() -> None:
    """The times are shown all the same, and for --json the formula is null."""
    profile = with_some((0, 1), links=False)
    assert sheet(profile).rows[0][-2:] == ("-", "25.0")
    (data,) = profile_data(profile)["collectives"]
    assert data["formula_s"] == [None]


def test_json_has_all_of_it() -> None:
    """Workers, points, busy share, and what the links say at each size."""
    profile = with_some((0, 1), (0, 1, 2))
    first, second = profile_data(profile)["collectives"]
    assert first["workers"] == ["worker:0/cpu", "worker:1/cpu"]
    assert first["points"] == [{"bytes": 2e7, "seconds": 40e-3, "samples": 9, "spread": 0.03}]
    assert (first["backend"], first["busy"]) == ("gloo", 0.25)
    assert first["formula_s"] == [pytest.approx(2 * 10.1e-3)]
    assert second["formula_s"] == [pytest.approx(4 * 10.1e-3)]


def test_many_sets_are_those_that_tell_most() -> None:
    """All workers together are among them; -v lists every set; none are no table."""
    pairs = [(one, other) for one in range(7) for other in range(one + 1, 7)]
    profile = with_some(*pairs, tuple(range(7)), workers=7)
    slow = reduced(profile, 2, 5, seconds=1.0)
    names = [each.workers for each in profile.collectives]
    profile = replace(
        profile,
        collectives=tuple(
            slow if each == slow.workers else old for each, old in zip(names, profile.collectives, strict=True)
        ),
    )
    found = sheet(profile)
    assert len(found.rows) == ROW_LIMIT
    assert "16 of 22 sets" in found.title
    assert {"worker:2/cpu, worker:5/cpu", "worker:0-6/cpu (7)"} <= {row[0] for row in found.rows}
    assert len(sheet(profile, everything=True).rows) == len(profile.collectives)
    assert collectives(replace(profile, collectives=())) == ()


def test_the_profile_and_the_page_show_them() -> None:
    """Behind the links, in both."""
    profile = with_some((0, 1))
    titles = [part.title for part in profile_report(profile) if isinstance(part, Sheet)]
    assert titles[-1].startswith("all-reduces")
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])])
    text = page_html([shown("plan", plan, profile)], title="t", made_at="now")
    assert "all-reduces, by the bytes that each worker adds" in text
    without = page_html([shown("plan", plan, replace(profile, collectives=()))], title="t", made_at="now")
    assert "all-reduces" not in without
