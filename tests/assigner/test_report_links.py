"""Links as matrices: of workers, of groups, of kinds."""

from dataclasses import replace

from builders import make_profile

from assigner.report.links import MATRIX_LIMIT, links
from assigner.report.sheet import Line


def profile(workers, *, hosts, kinds=1):
    """Workers in equal parts on hosts; links between hosts take ten times as long."""
    made = make_profile(work=[1e-3] * 2, slowness=[1] * workers)
    share = workers // hosts
    placed = tuple(
        replace(each, kind=f"k{each.rank // share % kinds}", host=f"h{each.rank // share}") for each in made.workers
    )
    host = {each.name: each.host for each in placed}
    moved = tuple(
        link
        if host[link.source] == host[link.target]
        else replace(link, points=tuple(replace(point, seconds=10 * point.seconds) for point in link.points))
        for link in made.links
    )
    return replace(made, workers=placed, links=moved)


def test_few_workers_have_a_row_and_a_column_each():
    """Bandwidth first, then latency; the diagonal is empty."""
    carried, latency = links(profile(3, hosts=1))
    assert [row[0] for row in carried.rows] == ["worker:0/cpu", "worker:1/cpu", "worker:2/cpu"]
    assert carried.rows[0][1] == "-"
    assert "latency" in latency.title


def test_sixteen_workers_fit_at_120_columns_and_are_groups_at_80():
    """By their ranks where there is room, else by host and kind with the median of their links."""
    carried, latency = links(profile(MATRIX_LIMIT, hosts=2))
    for sheet in (carried, latency):
        assert len(sheet.fitted(120).columns) == 17
        narrow = sheet.fitted(80)
        assert [row[0] for row in narrow.rows] == ["0 h0, k0 (x8)", "1 h1, k0 (x8)"]
    inside, across = (float(text) for text in carried.fitted(80).rows[0][1:])
    assert 9 < inside / across < 11


def test_many_workers_are_groups_and_the_extremes_are_named():
    """Above the limit groups, and a line with the slowest and the fastest link; -v has every worker."""
    whole = profile(24, hosts=4, kinds=2)
    carried, _, line = links(whole)
    assert [row[0] for row in carried.rows] == [f"{n} h{n}, k{n % 2} (x6)" for n in range(4)]
    assert isinstance(line, Line)
    assert line.text.startswith("of 552 links: slowest worker:")
    assert len(links(whole, everything=True)[0].rows) == 24


def test_many_hosts_are_pairs_of_kinds():
    """Where groups are too many, pairs of kinds tell links on one host from links between hosts; slowest first."""
    carried, latency, _ = links(profile(40, hosts=20, kinds=2))
    assert [row[:4] for row in carried.rows][-1][2] == "on one host"
    assert {row[:3] for row in carried.rows} == {
        ("k0", "k0", "between hosts"), ("k0", "k1", "between hosts"), ("k1", "k1", "between hosts"),
        ("k0", "k0", "on one host"), ("k1", "k1", "on one host"),
    }  # fmt: skip
    assert sum(int(row[3].replace(",", "")) for row in carried.rows) == 40 * 39
    assert latency.rows[0][2] == "between hosts"


def test_without_links_a_warning():
    """One worker needs none; several that cannot talk are told."""
    assert links(make_profile(work=[1e-3], slowness=[1])) == ()
    (line,) = links(make_profile(work=[1e-3], slowness=[1, 1], links=False))
    assert "no two workers can talk" in line.text
