"""Figures that were measured again, in the profile that had others."""

from dataclasses import replace

from builders import make_profile

from assigner.formats.merging import merged
from assigner.formats.profile import Collective, Link, LinkPoint, Wire, WireLink
from assigner.profiler.assembly import RankReport, renew
from assigner.profiler.host import HostFacts


def make_report(rank, *targets, seconds=2e-3):
    """Of a rank whose links to some others took so long."""
    points = tuple(LinkPoint(size, seconds * (n + 1), 9, 0.01) for n, size in enumerate((1000, 100_000)))
    links = tuple(Link(f"worker:{rank}/cpu", f"worker:{target}/cpu", points, "gloo", 0.1, 0.2) for target in targets)
    return RankReport(HostFacts(f"host{rank}", rank, "cpu", "CPU", 10**9, 1), (), {}, links)


def test_links_that_nobody_measured_get_the_new_medians():
    """After a merge the sampled pairs stand for all pairs between the groups, and old stand-ins are renewed."""
    groups = [make_profile(work=[1e-3], slowness=[1.0] * 2) for _ in range(2)]
    old = merged([("a", groups[0]), ("b", groups[1])])
    none = tuple(replace(point, samples=0, seconds=9.0) for point in old.links[0].points)
    old = replace(old, links=(replace(old.links[0], points=none), *old.links[1:]))
    new = renew(old, [make_report(0, 2), make_report(1), make_report(2, 0), make_report(3)])
    ways = {(link.source, link.target): link for link in new.links}
    assert len(ways) == 12
    assert ways["worker:0/cpu", "worker:2/cpu"].points[0].samples == 9
    stands_in = ways["worker:1/cpu", "worker:3/cpu"].points
    assert (stands_in[0].samples, stands_in[0].bytes) == (0, 1000)
    again = ways[old.links[0].source, old.links[0].target].points
    assert again[0].samples == 0
    assert again[0].seconds < 9.0
    assert set(old.links[1:]) <= set(new.links)
    assert any("7 of 12 links were not measured" in text for text in new.warnings)
    assert not any("no links between" in text for text in new.warnings)


def test_without_new_links_the_old_ones_stay():
    """Where compute alone was measured again."""
    old = make_profile(work=[1e-3], slowness=[1.0] * 2)
    assert renew(old, [make_report(0), make_report(1)]).links == old.links


def test_all_reduces_replace_older_ones():
    """The smallest sets first; what was not measured again stays as it was."""
    points = (LinkPoint(1 << 18, 2e-3, 9, 0.01),)
    stays = Collective(("worker:0/cpu", "worker:2/cpu"), (LinkPoint(1 << 18, 7.0),))
    older = Collective(("worker:1/cpu", "worker:0/cpu"), (LinkPoint(1 << 18, 9.0),))
    old = replace(make_profile(work=[1e-3], slowness=[1.0] * 3), collectives=(older, stays))
    new = [
        Collective(tuple(f"worker:{rank}/cpu" for rank in ranks), points, "gloo", 0.25, 0.02)
        for ranks in ((0, 1), (0, 1, 2))
    ]
    reports = [replace(make_report(0), collectives=(new[1], new[0])), make_report(1), make_report(2)]
    assert renew(old, reports).collectives == (stays, *new)
    assert renew(old, [make_report(rank) for rank in range(3)]).collectives == old.collectives


def test_wires_are_found_anew_with_links():
    """What was found with new links takes the place of all that was known; without new links it stays."""
    old = make_profile(work=[1e-3], slowness=[1.0] * 3)
    rest = [make_report(1), make_report(2)]
    ends = [("worker:0/cpu", "worker:1/cpu"), ("worker:2/cpu", "worker:0/cpu")]
    wire = Wire(tuple(WireLink(*each) for each in ends), 1.8)
    new = renew(old, [replace(make_report(0, 1), wires=(wire,)), *rest])
    assert new.wires == (wire,)
    assert renew(new, [make_report(rank) for rank in range(3)]).wires == new.wires
    assert renew(new, [make_report(0, 1), *rest]).wires == ()
