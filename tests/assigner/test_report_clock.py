"""The clock table: every action once, no earlier than it can be."""

from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError
from assigner.formats.profile import Tie
from assigner.report.clock import STAGE_LIMIT, clock, clock_data, clock_table
from assigner.report.sheet import Line, Strip
from assigner.schedule.program import ActionKind

CHAIN = make_profile(work=[1e-3] * 4, slowness=[1, 2, 1, 1], batch=12)


def table(plan, profile=None):
    """The table's rows as one string each, without the worker's name."""
    return [" ".join(cells) for _, cells in clock_table(plan, profile)[0].rows]


def plan(schedule, *stages, micro_batches=3, profile=CHAIN, depths=()):
    made = replace(make_plan(profile, stages, micro_batches=micro_batches), schedule=schedule)
    pairs = zip(made.stages, depths or [None] * len(made.stages), strict=True)
    return replace(made, stages=tuple(replace(stage, in_flight=depth) for stage, depth in pairs))


def test_gpipe():
    """All forwards, then all backwards in reverse order."""
    assert table(plan("gpipe", (0, ["p0", "p1"]), (1, ["p2", "p3"]))) == [
        "F0 F1 F2 . . B2 B1 B0",
        ". F0 F1 F2 B2 B1 B0 .",
    ]


def test_1f1b_and_a_deeper_warm_up():
    """Each stage warms up to its depth, then alternates."""
    halves = (0, ["p0", "p1"]), (1, ["p2", "p3"])
    assert table(plan("1f1b", *halves)) == ["F0 F1 . B0 F2 B1 . B2", ". F0 B0 F1 B1 F2 B2 ."]
    assert table(plan("1f1b", *halves, depths=(3, 1))) == ["F0 F1 F2 B0 . B1 . B2", ". F0 B0 F1 B1 F2 B2 ."]


def test_interleaved_stages_of_a_worker_take_turns():
    """Two stages of one worker have a row each and never stand at the same tick."""
    made = plan("interleaved", (0, ["p0"]), (1, ["p1", "p2"]), (0, ["p3"]), micro_batches=2)
    assert table(made) == ["F0 F1 . . . . B1 B0", ". F0 F1 . . B1 B0 .", ". . F0 F1 B1 B0 . ."]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("micro_batches", [1, 2, 6, 12])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_ticks_respect_the_dependencies(schedule, micro_batches, count, exact):
    """Every action stands once, one a worker and tick, behind what it needs, and not later than that."""
    stages = [(n, CHAIN.order[n * 4 // count : (n + 1) * 4 // count]) for n in range(count)]
    made = plan(schedule, *stages, micro_batches=micro_batches)
    found = clock(made, CHAIN if exact else None)
    at = {(each.kind, each.stage, each.micro_batch): each.tick for each in found}
    assert len(at) == len(found) == 2 * count * micro_batches
    assert len({(each.stage, each.tick) for each in found}) == len(found)
    busy = {(each.stage, each.tick) for each in found}
    for (kind, stage, m), tick in at.items():
        before = (
            (ActionKind.FORWARD, stage - 1, m) if kind is ActionKind.FORWARD else (ActionKind.BACKWARD, stage + 1, m)
        )
        needs = [at[before]] if before in at else []
        needs += [at[ActionKind.FORWARD, stage, m]] if kind is ActionKind.BACKWARD else []
        assert all(tick > each for each in needs)
        assert tick == 0 or (stage, tick - 1) in busy or tick - 1 in needs
    data = clock_data(made, CHAIN if exact else None)
    assert data["ticks"] == 1 + max(at.values())
    assert data["exact"] == exact


def test_the_profile_knows_which_stage_needs_which():
    """Two branches run at the same tick where the profile shows it; without it they are taken as a chain."""
    branches = make_profile(work=[1e-3] * 3, slowness=[1, 1, 1], edges=[(0, 2), (1, 2)])
    made = plan("gpipe", (0, ["p0"]), (1, ["p1"]), (2, ["p2"]), micro_batches=1, profile=branches)
    assert table(made, branches) == ["F0 . . B0", "F0 . . B0", ". F0 B0 ."]
    assert table(made) == ["F0 . . . . B0", ". F0 . . B0 .", ". . F0 B0 . ."]


def test_ties_do_not_hold_it_up():
    """A shared parameter is exchanged behind the last backward, which the table does not show."""
    tied = replace(CHAIN, ties=(Tie("w", ("p0", "p3"), 8.0),))
    halves = (0, ["p0", "p1"]), (1, ["p2", "p3"])
    assert table(plan("gpipe", *halves), tied) == table(plan("gpipe", *halves), CHAIN)


def test_a_plan_that_cannot_run_says_why():
    """A program that would wait for ever has no table, a sentence instead, and null in --json."""
    made = plan("1f1b", (0, ["p0", "p1"]), (1, ["p2", "p3"]), depths=(1, 3))
    with pytest.raises(FormatError):
        clock(made)
    (line,) = clock_table(made)
    assert isinstance(line, Line)
    assert "wait for ever" in line.text
    assert "--profile" in line.text
    assert "--profile" not in clock_table(made, CHAIN)[0].text
    assert clock_data(made) is None


def test_json_has_every_stage():
    """Each stage's actions with their ticks."""
    data = clock_data(plan("gpipe", (0, ["p0", "p1"]), (1, ["p2", "p3"]), micro_batches=1))
    assert data == {
        "ticks": 4,
        "exact": False,
        "stages": [
            [{"tick": 0, "kind": "forward", "micro_batch": 0}, {"tick": 3, "kind": "backward", "micro_batch": 0}],
            [{"tick": 1, "kind": "forward", "micro_batch": 0}, {"tick": 2, "kind": "backward", "micro_batch": 0}],
        ],
    }


def test_many_stages_leave_out_the_middle():
    """Above the limit the first and the last stages are shown, and a line names those between."""
    count = STAGE_LIMIT + 4
    long = make_profile(work=[1e-3] * count, slowness=[1] * count)
    made = plan("gpipe", *((n, [f"p{n}"]) for n in range(count)), micro_batches=2, profile=long)
    strip, line = clock_table(made)
    assert [name.split()[0] for name, _ in strip.rows] == [str(n) for n in (*range(8), *range(12, 20))]
    assert line.text == "4 stages between 7 and 12: -v lists all"
    assert len(clock_table(made, everything=True)[0].rows) == count


@pytest.mark.parametrize("width", [20, 40, 80, 81, 82, 83, 84, 120])
def test_a_strip_fits_its_width_and_says_what_is_missing(width):
    """Columns in the middle give way to one sign, and a line counts them."""
    strip = Strip("s", ("tick", tuple(map(str, range(40)))), (("a", tuple(f"F{n}" for n in range(40))),))
    lines = strip.lines(width)
    assert max(map(len, lines)) <= max(width, 46)
    head = lines[0].split()[1:]
    shown = [cell for cell in head if cell != "…"]
    missing = 40 - len(shown)
    assert (f"… {missing} of 40 ticks" in lines[-1]) == bool(missing)
    assert (shown[0], shown[-1]) == ("0", "39")


def test_a_strip_with_room_is_whole():
    """Where all fits nothing is left out."""
    strip = Strip("s", ("tick", ("0", "1")), (("worker", ("F0", ".")),))
    assert strip.lines(80) == ["tick    0  1", "worker  F0 ."]


def test_the_title_says_where_dependencies_are_taken_for_granted():
    """Without a profile, of more than two stages: each is taken to need the one before it."""
    diamond = make_profile(work=[1e-3] * 4, slowness=[1] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    plan = make_plan(diamond, [(n, [f"p{n}"]) for n in range(4)])
    two = make_plan(diamond, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])
    said = "each stage is taken to need the one before it"
    assert said in clock_table(plan)[0].title
    assert said not in clock_table(plan, diamond)[0].title
    assert said not in clock_table(two)[0].title


def test_a_table_of_too_many_cells_is_a_sentence():
    """Nobody could read it; in JSON there is none."""
    made = make_plan(make_profile(work=[1e-3] * 2, slowness=[1, 1], batch=65_536), [(0, ["p0"]), (1, ["p1"])])
    made = made.cut(65_536, 1, batch_size=65_536)
    (line,) = clock_table(made)
    assert line.text == "no clock table: 65,536 micro-batches on 2 workers are too many for one"
    assert clock_data(made) is None
