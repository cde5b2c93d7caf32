"""What fills each worker's memory."""

from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.report.memory import WORKER_LIMIT, contents, memory_bars, memory_data, misfit, stacked
from assigner.schedule.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2], capacity=4e7)


@pytest.fixture
def plan():
    return priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), PROFILE)


def test_the_parts_add_up_to_the_memory(plan):
    """All parts, the reserve and what is free are the worker's whole memory."""
    reserved = replace(PROFILE, workers=tuple(replace(each, reserve_bytes=5e6) for each in PROFILE.workers))
    worker = priced(plan, reserved).predicted.workers[0]
    held = contents(worker, 5e6)
    assert sum(held.values()) == pytest.approx(4e7)
    assert held["free"] == pytest.approx(4e7 - 5e6 - worker.peak_bytes)
    assert "reserve" not in contents(worker)


@pytest.mark.parametrize("width", [1, 7, 20, 33])
def test_a_bar_is_shared_out_by_size(width):
    """Letters are as many as their share of the scale says, to one; the bar is always as wide; a reserve is no use."""
    held = {"parameters": 30.0, "gradients": 10.0, "activations": 27.0, "reserve": 500.0, "free": 9000.0}
    drawn = stacked(held, 100.0, width=width)
    assert len(drawn) == width
    for letter, share in (("P", 0.3), ("G", 0.1), ("A", 0.27), (".", 0.33)):
        assert abs(drawn.count(letter) - width * share) < 1
    assert drawn == "".join(sorted(drawn, key="PGA.".index))


def test_what_does_not_fit_ends_in_a_mark():
    """Without room the bar is the need alone, and its last sign says that it is too much."""
    assert stacked({"parameters": 3.0, "activations": 1.0, "free": -1.0}, 4.0, width=8) == "PPPPPPA!"
    assert stacked({"parameters": 0.0, "free": 0.0}, 0.0, width=3) == "..."


def test_the_fullest_bar_is_full_however_large_the_memory_is(plan):
    """A model that needs a thousandth of its worker's memory has bars to look at, and the title says their scale."""
    large = replace(PROFILE, workers=tuple(replace(each, memory_bytes=1e12) for each in PROFILE.workers))
    (sheet,) = memory_bars(priced(plan, large))
    assert "." not in max((row[1] for row in sheet.rows), key=lambda bar: -bar.count("."))
    assert "a whole bar is the largest peak, " in sheet.title


def test_bars_and_figures_stand_together(plan):
    """A row per worker; parts that nobody has are left out, and the title is the legend."""
    (sheet,) = memory_bars(plan)
    assert [column.header for column in sheet.columns] == ["worker", "", "P", "G", "O", "A", "M", "free"]
    assert sheet.title.startswith("peak memory, MiB: P parameters, G gradients")
    assert sheet.rows[0][0] == "worker:0/cpu"
    assert sheet.rows[0][2] == "1.91"
    free = plan.predicted.workers[0].capacity_bytes - plan.predicted.workers[0].peak_bytes
    assert float(sheet.rows[0][-1]) == pytest.approx(free / 2**20, rel=0.01)


def test_the_reserve_is_known_from_the_profile(plan):
    """With the profile at hand what plans leave alone is there too."""
    reserved = replace(PROFILE, workers=tuple(replace(each, reserve_bytes=5e6) for each in PROFILE.workers))
    (sheet,) = memory_bars(plan, reserved)
    assert sheet.columns[-2].header == "R"
    assert "R" not in sheet.rows[0][1]
    assert memory_data(plan, reserved)["worker:0/cpu"]["reserve"] == 5e6


def test_of_many_workers_the_fullest_are_shown(plan):
    """Above the limit those with the least room are shown in the plan's order; --json has all."""
    first = plan.predicted.workers[0]
    many = tuple(
        replace(first, worker=f"worker:{n}/cpu", peak_bytes=float(n % 20) * 1e6) for n in range(WORKER_LIMIT + 4)
    )
    wide = replace(plan, predicted=replace(plan.predicted, workers=many))
    (sheet,) = memory_bars(wide)
    assert [row[0] for row in sheet.rows] == [f"worker:{n}/cpu" for n in range(4, 20)]
    assert "16 fullest of 20" in sheet.title
    assert len(memory_bars(wide, everything=True)[0].rows) == len(memory_data(wide)) == 20


def test_without_a_prediction_there_is_nothing(plan):
    """An unpriced plan has no bars."""
    assert memory_bars(replace(plan, predicted=None)) == ()
    assert memory_data(replace(plan, predicted=None)) == {}


def test_what_does_not_fit_is_a_sentence(plan):
    """The worker that is fullest for its room, and how many more; the free column is below zero."""
    first, second = plan.predicted.workers
    over = replace(first, peak_bytes=6 * 2.0**30, capacity_bytes=4 * 2.0**30)
    one = replace(plan, predicted=replace(plan.predicted, workers=(over, second)))
    sheet, line = memory_bars(one)
    assert line.text == "does not fit: worker:0/cpu needs 6.00 GiB and has 4.00 GiB"
    assert sheet.rows[0][1].endswith("!")
    assert sheet.rows[0][-1] == "-2.00"
    both = replace(one.predicted, workers=(over, replace(second, capacity_bytes=0.0)))
    assert misfit(both).text.startswith("does not fit: worker:1/cpu")
    assert misfit(both).text.endswith(", and 1 more worker")
    assert misfit(plan.predicted) is None


def test_the_fullest_are_those_with_the_largest_share():
    """A small worker that is nearly full comes before a large one with less room than that has in bytes."""
    profile = make_profile(work=[1e-3] * (WORKER_LIMIT + 1), slowness=[1] * (WORKER_LIMIT + 1))
    plan = priced(make_plan(profile, [(n, [f"p{n}"]) for n in range(WORKER_LIMIT + 1)]), profile)
    small, *others = plan.predicted.workers
    workers = (
        replace(small, peak_bytes=90.0, capacity_bytes=100.0),
        *(replace(each, peak_bytes=1e3, capacity_bytes=1e3 + 5 + n) for n, each in enumerate(others[1:])),
        replace(others[0], peak_bytes=0.0, capacity_bytes=4.0),
    )
    sheet = memory_bars(replace(plan, predicted=replace(plan.predicted, workers=workers)))[0]
    shown = [row[0] for row in sheet.rows]
    assert small.worker in shown
    assert others[0].worker not in shown
