from dataclasses import replace

import pytest
from builders import make_plan, make_profile

from assigner.errors import FormatError
from assigner.report.comparison import (
    Named,
    changes,
    check_comparable,
    comparison_report,
    differ,
    memory_share,
    transfer_share,
)
from assigner.report.sheet import Line, Sheet
from assigner.simulate import priced

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])


def plan(*stages, micro_batches=4):
    return priced(make_plan(PROFILE, stages, micro_batches=micro_batches), PROFILE)


BASE = Named("base", plan((0, ["p0", "p1"]), (1, ["p2", "p3"])))


def test_changes_keep_the_baselines_order():
    """Every partition is listed in pipeline order, and only the moved one differs."""
    found = changes(BASE.plan, plan((0, ["p0", "p1", "p2"]), (1, ["p3"])))
    assert [(each.partition, each.differs) for each in found] == [
        ("p0", False), ("p1", False), ("p2", True), ("p3", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        plan((0, ["p0", "p1"]), (1, ["p2", "p3"]), micro_batches=2),
        plan((0, ["p0"]), (1, ["p1", "p2", "p3"])),
        replace(BASE.plan, stages=(replace(BASE.plan.stages[0], rematerialise=("p1",)), BASE.plan.stages[1])),
        replace(BASE.plan, stages=(replace(BASE.plan.stages[0], in_flight=2), BASE.plan.stages[1])),
        replace(BASE.plan, schedule="1f1b"),
    ],
    ids=["split", "placement", "remat", "depth", "schedule"],
)
def test_whatever_runs_otherwise_differs(other):
    """Split, placement, remat, depth and schedule each make another plan, and each is shown."""
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
