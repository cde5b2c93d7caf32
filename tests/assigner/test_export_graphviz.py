import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError
from assigner.export import graphviz
from assigner.export.graphviz import partition_drawing
from assigner.formats.profile import Tie

ODD = 'a"quoted\\name', "two\nlines", "<b>&amp;</b>", "\\N\\", "null\0", "größe.0"


def renamed(profile, names):
    """The same profile with other names, in order."""
    new = dict(zip([each.name for each in profile.partitions], names, strict=True))
    return replace(
        profile,
        partitions=tuple(replace(each, name=new[each.name], kind=new[each.name]) for each in profile.partitions),
        edges=tuple(replace(each, source=new[each.source], target=new[each.target]) for each in profile.edges),
        measurements=tuple(replace(each, partition=new[each.partition]) for each in profile.measurements),
    )


def alike(profile):
    """All partitions but the first and the last of one kind."""
    last = len(profile.partitions) - 1
    kinds = ["first", *["block"] * (last - 1), "last"]
    parts = tuple(replace(part, kind=kind) for part, kind in zip(profile.partitions, kinds, strict=True))
    return replace(profile, partitions=parts)


@pytest.fixture
def laid_out():
    """Reads a drawing with Graphviz' own `dot`: its boxes and arrows, each with its attributes."""
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("Graphviz is not installed: apt-get install graphviz")

    def lay_out(text):
        done = subprocess.run([dot, "-Tjson"], input=text, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        graph = json.loads(done.stdout)
        boxes = [each for each in graph["objects"] if not each["name"].startswith("cluster")]
        return boxes, graph.get("edges", []), [each for each in graph["objects"] if each["name"].startswith("cluster")]

    return lay_out


def shown(box):
    """The lines of a box's label as dot draws them."""
    return [each["text"] for each in box["_ldraw_"] if each["op"] == "T"]


def test_boxes_arrows_and_stages(laid_out):
    """A box for each partition in its stage's cluster; an arrow for each edge, with the bytes of a micro-batch."""
    profile = make_profile(work=[1e-3] * 5, slowness=[1.0, 2.0], edges=[(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
    plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3", "p4"])])
    boxes, arrows, clusters = laid_out(partition_drawing(plan, profile, every=True).text)
    assert [shown(box)[0] for box in boxes] == ["p0", "p1", "p2", "p3", "p4"]
    assert shown(boxes[0])[1] == "6.00 ms  ·  977 KiB"  # two samples of 1 ms forward and 2 ms backward
    assert len(arrows) == len(profile.edges)
    assert {each["label"] for each in arrows} == {"195 KiB"}  # two samples of 100 kB
    assert ["worker:1/cpu on host1" in each["label"] for each in clusters] == [False, True]
    assert {box["fillcolor"] for box in boxes} == {graphviz.worker_colour(0), graphviz.worker_colour(1)}


def test_arrows_between_workers_stand_out(laid_out):
    """What goes over a link is thick."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0])
    plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    _, arrows, _ = laid_out(partition_drawing(plan, profile).text)
    assert [each.get("penwidth") for each in arrows] == [None, "2.2", None]


def test_names_are_drawn_as_they_are(laid_out):
    """Quotes, backslashes, line breaks, entities and signs that cannot be printed neither break nor change a name."""
    profile = renamed(make_profile(work=[1e-3] * 6, slowness=[1.0]), ODD)
    profile = replace(profile, workload=replace(profile.workload, name='a<b>&"c"\n'))
    boxes, _, _ = laid_out(partition_drawing(make_plan(profile, [(0, ODD)]), profile).text)
    printed = ['a"quoted\\name', "two\\nlines", "<b>&amp;</b>", "\\N\\", "null\\x00", "größe.0"]
    assert [shown(box)[0] for box in boxes] == printed


def test_a_hundred_partitions_are_one_picture(laid_out):
    """Like partitions in a row of a stage are one box, and every one of them is in its tooltip."""
    profile = alike(make_profile(work=[1e-3] * 100, slowness=[1.0] * 4))
    names = [part.name for part in profile.partitions]
    plan = make_plan(profile, [(n, names[25 * n : 25 * (n + 1)]) for n in range(4)])
    boxes, arrows, _ = laid_out(partition_drawing(plan, profile).text)
    assert [shown(box)[0] for box in boxes] == ["p0", "p1-24 (24)", "p25-49 (25)", "p50-74 (25)", "p75-98 (24)", "p99"]
    assert sum(box["tooltip"].count("p") for box in boxes) == 100
    assert len(arrows) == 5
    assert len(re.findall(r"^ +n\d+ \[", partition_drawing(plan, profile, every=True).text, re.M)) == 100


def test_rematerialised_partitions_are_dashed_and_say_so(laid_out):
    """A run ends where rematerialisation does; the time has the recompute in it."""
    profile = alike(make_profile(work=[1e-3] * 8, slowness=[1.0]))
    names = [part.name for part in profile.partitions]
    plan = make_plan(profile, [(0, names)])
    plan = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p1", "p2", "p3")),))
    boxes, _, _ = laid_out(partition_drawing(plan, profile).text)
    dashed = {shown(box)[0]: ("dashed" in box.get("style", ""), shown(box)[1]) for box in boxes}
    assert dashed["p1-3 (3)"] == (True, "24.0 ms  ·  2.86 MiB  ·  remat")
    assert dashed["p4-6 (3)"] == (False, "18.0 ms  ·  2.86 MiB")


def test_shared_parameters_are_dotted(laid_out):
    """A line without a head between the partitions that hold one."""
    profile = replace(make_profile(work=[1e-3] * 3, slowness=[1.0]), ties=(Tie("word.weight", ("p0", "p2"), 1e3),))
    _, arrows, _ = laid_out(partition_drawing(make_plan(profile, [(0, ["p0", "p1", "p2"])]), profile, every=True).text)
    (tie,) = [each for each in arrows if each.get("style") == "dotted"]
    assert tie["label"] == "shared: word.weight"


def test_colours_are_legible_and_differ():
    """Text on each of 24 colours has a contrast of 4.5 or more (WCAG AA), and no two workers have one colour."""
    colours = [graphviz.worker_colour(n) for n in range(24)]
    assert len(set(colours)) == 24
    assert min(graphviz.contrast(each, graphviz.text_colour(each)) for each in colours) >= 4.5
    assert graphviz.contrast("#FFFFFF", "#000000") == pytest.approx(21)


def test_a_profile_of_another_workload_is_refused():
    """Partitions that the profile has not cannot be drawn."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0])
    with pytest.raises(FormatError, match="'nobody'"):
        partition_drawing(make_plan(profile, [(0, ["p0", "p1", "p2", "nobody"])]), profile)
