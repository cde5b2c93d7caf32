from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError
from assigner.formats.plan import ProfileReference
from assigner.formats.solverreport import SolverReport
from assigner.report.comparison import (
    Named,
    check_comparable,
    comparison_data,
    comparison_report,
    differ,
    memory_share,
    money,
    notes,
    stored_prices,
    transfer_share,
)
from assigner.report.placementchanges import both_places
from assigner.report.sheet import Line, Sheet
from assigner.schedule.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


def plan(*stages, micro_batches=4):
    return priced(make_plan(PROFILE, stages, micro_batches=micro_batches), PROFILE)


BASE = Named("base", plan((0, ["p0", "p1"]), (1, ["p2", "p3"])))


def test_changes_keep_the_baselines_order():
    """Every partition is listed in pipeline order, and only the moved one differs."""
    found = both_places(BASE.plan, plan((0, ["p0", "p1", "p2"]), (1, ["p3"])))
    assert [(name, before != after) for name, (before, after) in found.items()] == [
        ("p0", False), ("p1", False), ("p2", True), ("p3", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        plan((0, ["p0", "p1"]), (1, ["p2", "p3"]), micro_batches=2),
        plan((0, ["p0"]), (1, ["p1", "p2", "p3"])),
        replace(BASE.plan, stages=(replace(BASE.plan.stages[0], rematerialise=("p1",)), BASE.plan.stages[1])),
        replace(BASE.plan, schedule="1f1b"),
    ],
    ids=["split", "placement", "remat", "schedule"],
)
def test_whatever_runs_otherwise_differs(other):
    """Split, placement, remat and schedule each make another plan, and each is shown."""
    assert differ([BASE, Named("other", other)])
    parts = comparison_report([BASE, Named("other", other)])
    assert isinstance(parts[-1], Sheet)
    assert len(parts[-1].rows) >= 1


def test_prediction_alone_is_no_difference():
    """Two plans that run alike do not differ, whatever is predicted of them."""
    same = Named("same", replace(BASE.plan, predicted=None))
    assert not differ([BASE, same])
    assert comparison_report([BASE, same])[-1] == Line("same does the same as base")


def test_unpriced_plan_is_compared_with_a_warning():
    """A plan without a prediction has dashes and a line that says how to get one."""
    parts = comparison_report([Named("bare", replace(BASE.plan, predicted=None)), BASE])
    assert parts[0].rows[0][1] == "-"
    assert parts[0].rows[1][3] == "-"
    assert parts[0].rows[0][3] == "baseline"
    assert any(isinstance(part, Line) and "not priced" in part.text for part in parts)


def test_other_partitions_are_refused():
    """Plans over other partitions of a workload of the same name are not comparable."""
    smaller = plan((0, ["p0", "p1"]), (1, ["p2", "p3"]))
    stages = (smaller.stages[0], replace(smaller.stages[1], partitions=("p2",)))
    with pytest.raises(FormatError, match=r"base places partition 'p3', small does not"):
        check_comparable([BASE, Named("small", replace(smaller, stages=stages))])


def test_shares():
    """The memory share is the fullest worker's, the transfer share is over all workers' time."""
    predicted = BASE.plan.predicted
    assert memory_share(BASE.plan) == max(each.peak_bytes / each.capacity_bytes for each in predicted.workers)
    waiting = sum(each.transfer_s for each in predicted.workers)
    assert transfer_share(BASE.plan) == pytest.approx(waiting / (2 * predicted.step_s))


def test_unlike_batches_are_compared_by_samples_a_second():
    """The speed-up is that of samples/s, which is always shown then, with each plan's batch; and it is said."""
    double = replace(BASE.plan, workload=replace(BASE.plan.workload, batch_size=16), micro_batch_size=4)
    sheet, said = comparison_report([BASE, Named("double", double)])[:2]
    headers = [column.header for column in sheet.columns]
    assert headers[1] == "batch"
    assert [row[1] for row in sheet.rows] == ["8", "16"]
    assert sheet.rows[1][headers.index("speed-up")] == "2.00x"
    narrow = [column.header for column in sheet.fitted(70).columns]
    assert "samples/s" in narrow
    assert "samples/s" not in [column.header for column in comparison_report([BASE, BASE])[0].fitted(70).columns]
    assert said.text.startswith("batches differ (8, 16 samples)")


def test_other_measurements_are_told():
    """Plans from different profiles: each profile with its plans, and how to price all by one."""
    one, two = (
        Named(name, replace(BASE.plan, profile=ProfileReference("p.json", digest * 32)))
        for name, digest in (("one", "ab"), ("two", "cd"))
    )
    (said,) = notes([one, two])
    assert "p.json abababab: one; p.json cdcdcdcd: two" in said
    assert "--profile PROFILE" in said
    assert notes([one, one]) == []
    assert notes([one, two], priced_by="p.json") == ["all are priced by p.json, whatever they were solved from"]


def test_other_dtypes_are_told():
    """Plans of one model that do not train alike say so."""
    half = replace(BASE.plan, workload=replace(BASE.plan.workload, dtype="bfloat16"))
    assert notes([BASE, Named("half", half)]) == ["dtypes differ (float32, bfloat16): these plans do not train alike"]


def test_cost_where_every_price_is_known():
    """Money per 1000 samples: the hourly rate of the workers used, over the samples of an hour."""
    prices = replace(PROFILE, workers=tuple(replace(each, cost_per_hour=1.8) for each in PROFILE.workers))
    known = Named("known", BASE.plan, prices)
    assert money(known) == pytest.approx(3.6 / 3600 * 1000 / (8 / BASE.plan.predicted.step_s))
    assert money(BASE) is None
    half = replace(prices, workers=(prices.workers[0], PROFILE.workers[1]))
    assert money(Named("half", BASE.plan, half)) is None
    headers = [column.header for column in comparison_report([known, BASE])[0].columns]
    assert "per 1000" in headers
    assert "per 1000" not in [column.header for column in comparison_report([BASE, BASE])[0].columns]


def test_precision_holds_for_every_figure():
    """So many digits behind each point."""
    row = comparison_report([BASE, BASE], digits=4)[0].rows[0]
    figures = [cell for cell in row[1:] if "." in cell]
    assert len(figures) >= 5
    assert all(len(cell.split(".")[1]) == 4 for cell in figures)


@pytest.mark.parametrize("count", [5, 12])
def test_many_plans_fit_at_80_columns(count):
    """Each is one line with its number, and no number is cut."""
    plans = [Named(f"plan-{n}-of-many.json", BASE.plan) for n in range(count)]
    sheet = comparison_report(plans)[0]
    narrow = sheet.fitted(80)
    assert [column.header for column in narrow.columns][:4] == ["#", "plan", "step ms", "speed-up"]
    assert "memory %" in [column.header for column in narrow.columns]
    widths = [
        max(map(len, (column.header, *(row[n] for row in narrow.rows)))) for n, column in enumerate(narrow.columns)
    ]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80


def test_too_much_memory_is_marked():
    """A plan that does not fit says so in its cell."""
    worker = replace(BASE.plan.predicted.workers[0], peak_bytes=3e9, capacity_bytes=2e9)
    over = replace(BASE.plan, predicted=replace(BASE.plan.predicted, workers=(worker,)))
    assert "150.0!" in comparison_report([BASE, Named("over", over)])[0].rows[1]


def test_json_has_all_that_the_screen_says():
    """Figures, sources and notes of every plan."""
    data = comparison_data([BASE, Named("bare", replace(BASE.plan, predicted=None))], priced_by="p.json")
    assert data["notes"][0].startswith("bare is not priced")
    assert data["priced_by"] == "p.json"
    assert data["plans"][0]["batch_size"] == 8
    assert data["plans"][0]["schedule"] == "gpipe"
    assert data["plans"][1]["measured"] is None


def solver(gap, **options):
    step = BASE.plan.predicted.step_s
    return SolverReport("HiGHS", "1", "optimal", step, step * (1 - gap), gap, 0.1, options)


@pytest.mark.parametrize(
    ("change", "cell"),
    [({}, "2.0"), ({"solver": solver(1.0)}, "-"), ({"objective": "cost"}, "-"), ({"predicted": None}, "-")],
)
def test_a_gap_stands_only_where_it_is_proven_of_the_step(change, cell):
    """A dash where nothing is proven, or what is proven is of another thing."""
    found = Named("x", replace(BASE.plan, **{"solver": solver(0.02), **change}))
    sheet = comparison_report([BASE, found])[0]
    assert sheet.rows[1][[column.header for column in sheet.columns].index("gap %")] == cell
    assert comparison_data([BASE, found])["plans"][1]["gap"] == (None if cell == "-" else 0.02)


def test_prices_of_the_solve_come_before_the_profile():
    """By worker, kind or host, the last that matches, as the solver takes them."""
    named = Named("x", BASE.plan, PROFILE, prices={"host0": 9.0, "worker:0": 2.0, "kind1": 1.6})
    assert money(named) == pytest.approx(3.6 / 3600 * 1000 / (8 / BASE.plan.predicted.step_s))
    assert money(replace(named, prices={"worker:0": 2.0})) is None, "nobody knows what the other one costs"


@pytest.mark.parametrize("odd", [None, 3, {"worker:0": "free"}, {"worker:0": -1}])
def test_odd_prices_in_a_file_are_none(odd):
    """What no solve writes is not taken for money."""
    assert stored_prices(replace(BASE.plan, solver=solver(0.0, prices=odd))) == {}
    assert stored_prices(BASE.plan) == {}
    assert stored_prices(replace(BASE.plan, solver=solver(0.0, prices={"worker:0": 3}))) == {"worker:0": 3}


def test_notes_of_a_plan_have_its_name():
    """A plan whose file says something else is told with why, and not called unpriced besides."""
    bare = Named("x", replace(BASE.plan, predicted=None), notes=("it does not fit",))
    assert notes([BASE, bare]) == ["x: it does not fit"]
