"""Warnings that a profile's figures give."""

from dataclasses import replace

from builders import make_profile

from assigner.formats.profile import Collective, LinkPoint, Measurement
from assigner.formats.profilewarnings import other_warnings, profile_warnings, with_warnings


def wide(profile, *, at, **changes):
    """The profile with one measurement changed."""
    points = list(profile.measurements)
    points[at] = replace(points[at], **changes)
    return replace(profile, measurements=tuple(points))


def test_steady_figures_give_no_warning():
    """A spread of 10 % or less is not worth a warning."""
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 2.0])
    assert profile_warnings(profile) == ()
    assert profile_warnings(wide(profile, at=0, spread=0.10)) == ()


def test_every_wide_figure_is_named_and_the_widest_comes_first():
    """Forward and backward, the update, and messages of links; one line a partition and worker, or a link."""
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 2.0])
    first = profile.measurements[0]
    profile = wide(profile, at=0, spread=0.2, update_spread=0.5)
    link = profile.links[0]
    points = (replace(link.points[0], spread=0.9), link.points[1], replace(link.points[2], spread=0.11))
    profile = replace(profile, links=(replace(link, points=points), *profile.links[1:]))
    assert profile_warnings(profile) == (
        "link worker:0/cpu -> worker:1/cpu: spread 90 % at 1,000 B, 11 % at 9.54 MiB",
        f"{first.partition} on {first.worker}: spread 20 % at micro-batch {first.micro_batch}, 50 % of the update",
    )


def test_one_micro_batch_size_is_a_warning():
    """With one size plans cannot use another."""
    profile = make_profile(work=[1e-3], slowness=[1.0])
    (only,) = (each for each in profile.measurements if each.micro_batch == 4)
    assert "one micro-batch size was measured (4)" in profile_warnings(replace(profile, measurements=(only,)))[0]


def test_workers_that_no_links_connect_are_named():
    """Two groups with links inside and none between."""
    profile = make_profile(work=[1e-3], slowness=[1.0] * 4)
    groups = ({"worker:0/cpu", "worker:1/cpu"}, {"worker:2/cpu", "worker:3/cpu"})
    links = tuple(link for link in profile.links if any({link.source, link.target} == group for group in groups))
    (said,) = profile_warnings(replace(profile, links=links))
    assert said.startswith("no links between worker:0, worker:1 and worker:2, worker:3:")
    assert "--only links" in said


def test_warnings_of_figures_are_told_from_others():
    """A warning that was seen while measuring stays; one that the figures give comes and goes with them."""
    profile = make_profile(work=[1e-3], slowness=[1.0])
    loud = with_warnings(wide(profile, at=0, spread=0.3), ["the wire is shared"])
    assert len(loud.warnings) == 2
    assert other_warnings(loud) == ("the wire is shared",)
    calm = with_warnings(wide(loud, at=0, spread=0.01), other_warnings(loud))
    assert calm.warnings == ("the wire is shared",)


def test_an_infeasible_point_gives_no_spread():
    """What ran out of memory has no times."""
    profile = make_profile(work=[1e-3], slowness=[1.0])
    point = Measurement("p0", "worker:0/cpu", 8, infeasible="out of memory")
    assert profile_warnings(replace(profile, measurements=(*profile.measurements, point))) == ()


def test_workers_that_share_too_few_cores_are_told():
    """Those that are slowed by much, and how a profile without that is made; a newer look takes the warning away."""
    profile = make_profile(work=[1e-3], slowness=[1.0, 1.0, 2.0])
    crowded = replace(profile, workers=(*(replace(each, slower=2.0) for each in profile.workers[:2]),
                                        replace(profile.workers[2], slower=1.1)))  # fmt: skip
    told = (
        "worker:0, worker:1 have fewer cores than threads: each computed up to 2.0x as long as it does while others"
        " idle, and plans that leave workers out are predicted too slow: profile with fewer --workers or --threads"
    )
    assert profile_warnings(crowded) == (told,)
    assert with_warnings(profile, other_warnings(with_warnings(crowded))).warnings == ()


def test_a_busy_machine_is_the_first_warning():
    """The most that others had, of which workers, by points, links or all-reduces; little is not worth one."""
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 2.0])
    assert profile_warnings(wide(profile, at=0, starved=0.14)) == ()
    busy = wide(profile, at=0, starved=0.34, spread=0.2)
    told = (
        "measured on a busy machine: other programs had up to 34 % of the time of worker:0; its figures are too high,"
        " and unevenly so: measure again when it is quiet"
    )
    assert profile_warnings(busy)[0] == told
    assert other_warnings(with_warnings(busy)) == ()
    linked = replace(profile, links=(replace(profile.links[0], starved=0.5), *profile.links[1:]))
    messages = "of the time of worker:0, worker:1, while links and all-reduces were measured"
    assert f"up to 50 % {messages}" in profile_warnings(linked)[0]
    both = tuple(each.name for each in profile.workers)
    reduced = replace(profile, collectives=(Collective(both, (LinkPoint(1e6, 1e-3),), starved=0.6),))
    assert f"up to 60 % {messages}" in profile_warnings(reduced)[0]
