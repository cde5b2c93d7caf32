"""How sure a profile's figures are, in a few lines."""

from dataclasses import replace

from builders import make_profile

from assigner.formats.profilewarnings import wide_figures, with_warnings
from assigner.report.partitions import groups
from assigner.report.spread import doubt, spread_data, warnings, weighed

PROFILE = make_profile(work=[1e-5, 5e-3, 4e-3], slowness=[1, 2])


def loud(spreads, *, links=0):
    """Spreads by (partition, worker); the first points of so many links vary by half."""
    points = tuple(
        replace(each, spread=spreads.get((each.partition, each.worker), 0.0)) for each in PROFILE.measurements
    )
    wires = tuple(
        replace(link, points=(replace(link.points[0], spread=0.5), *link.points[1:])) if n < links else link
        for n, link in enumerate(PROFILE.links)
    )
    return with_warnings(replace(PROFILE, measurements=points, links=wires))


def said(profile, **more):
    return [line.text for line in warnings(profile, groups(profile), **more)]


def test_steady_figures_say_nothing():
    """No wide figure, no line."""
    assert said(loud({})) == []


def test_what_weighs_is_told_from_what_does_not():
    """A tiny partition that varies much is counted; the heavy one is what plans hang on, and is measured again."""
    found = said(loud({("p0", "worker:0/cpu"): 0.9, ("p1", "worker:1/cpu"): 0.2}, links=1))
    assert found[0] == (
        "warning: 2 of 6 timings and 1 of 2 links vary by more than 10 % (IQR / median); the worst:"
        " p0 on worker:0/cpu, 90 % at micro-batch 1"
    )
    assert found[1] == "  what plans hang on: p1, 20 % on worker:1/cpu (55 % of its time)"
    assert found[2].endswith("assigner profile tiny.py:workload -o PROFILE --only p1 --only links")
    assert "-v lists all" in found[3]
    assert len(found) == 4


def test_where_nothing_weighs_there_is_nothing_to_measure_again():
    """Tiny partitions alone: that is said, and no command is given."""
    found = said(loud({("p0", "worker:0/cpu"): 0.9}))
    assert "none of these partitions takes 5 %" in found[1]
    assert not any("measure again" in line for line in found)


def test_partitions_of_a_kind_weigh_together():
    """Of a group the measured one is named, and its share is that of all of them."""
    kinds = tuple(replace(part, kind="block") for part in PROFILE.partitions)
    measured = tuple(
        replace(each, spread=0.3) for each in PROFILE.measurements if each.partition == "p1" and each.worker[7] == "0"
    )
    profile = replace(PROFILE, partitions=kinds, measurements=measured, workers=PROFILE.workers[:1], links=())
    (found,) = weighed(groups(profile), wide_figures(profile))
    assert (found.partitions, found.share, found.spread) == (("p0", "p1", "p2"), 1.0, 0.3)


def test_everything_is_a_line_for_each():
    """-v lists every warning: what plans cannot do, spreads, and what was seen while measuring."""
    profile = loud({("p0", "worker:0/cpu"): 0.9, ("p1", "worker:1/cpu"): 0.2})
    profile = replace(profile, warnings=(*profile.warnings, "the wire is shared"))
    found = said(profile, everything=True)
    assert found[0].startswith("warning: p0 on worker:0/cpu: spread 90 %")
    assert found[-1] == "warning: the wire is shared"
    assert len(found) == 3


def test_lines_that_an_older_release_wrote_are_not_said_twice():
    """Its sentences on spreads are known as such, though it worded them otherwise."""
    profile = replace(
        loud({("p0", "worker:0/cpu"): 0.9}), warnings=("p0 on worker:0/cpu at micro-batch 1: spread 90%",)
    )
    assert len(said(profile, everything=True)) == 1


def test_other_warnings_are_few_lines():
    """Of many the first are shown, and how many more there are."""
    found = said(replace(loud({}), warnings=tuple(f"note {n}" for n in range(9))))
    assert found[-1] == "warning: 3 more like these: -v lists all"
    assert len(found) == 7


def test_json_has_every_figure():
    """All wide figures, the widest first, and what weighs."""
    data = spread_data(profile := loud({("p1", "worker:1/cpu"): 0.2}, links=1), groups(profile))
    assert [(each["partition"], each["target"]) for each in data["wide"]] == [
        ("", PROFILE.links[0].target), ("p1", ""), ("p1", ""),
    ]  # fmt: skip
    assert data["weighed"][0]["partitions"] == ["p1"]


def test_a_bad_profile_is_doubted_in_one_sentence():
    """A busy machine first, too few cores, then what plans hang on and varies much; one of steady figures is sound."""
    sound = loud({("p1", "worker:0/cpu"): 0.2, ("p0", "worker:0/cpu"): 0.9})
    assert doubt(sound) is None
    varying = loud({("p1", "worker:0/cpu"): 0.4, ("p2", "worker:1/cpu"): 0.5})
    assert doubt(varying) == (
        "what this plan hangs on varies in the profile: p2 by 50 % on worker:1/cpu and 1 more (assigner show says more)"
    )
    crowded = replace(varying, workers=tuple(replace(each, slower=2.0) for each in varying.workers))
    assert str(doubt(crowded)).startswith("in the profile worker:0, worker:1 have fewer cores than threads: each")
    busy = replace(crowded, measurements=tuple(replace(each, starved=0.4) for each in varying.measurements))
    assert str(doubt(busy)).startswith("the profile was measured on a busy machine: other programs had up to 40 %")
    assert str(doubt(busy)).endswith(f"; {doubt(crowded)}")
