"""A plan that does not fit is refused before any of it is built."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from example_plans import cut, make_plan, tiny

import assigner
from assigner.formats.prediction import Memory, Prediction, WorkerPrediction
from assigner.runtime.ranks import membership

if TYPE_CHECKING:
    from assigner.formats.plan import Plan

ENTRY = tiny("gpt")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A tiny GPT on one worker, predicted to take 1 MB of 2."""
    return predicted(make_plan(ENTRY, [(0, 5)]), peak=1e6, capacity=2e6)


def predicted(plan: Plan, *, peak: float, capacity: float) -> Plan:
    worker = WorkerPrediction("worker:0/cpu", 1.0, 0.0, 0.0, Memory(activations=peak), peak, capacity)
    return replace(plan, predicted=Prediction(1.0, 8.0, 0.0, (worker,), ()))


def test_a_plan_that_fits_is_built(plan: Plan) -> None:
    """Nothing stands in its way."""
    with assigner.Pipeline(assigner.load_workload(ENTRY), plan, graph=cut(ENTRY)) as pipeline:
        assert pipeline.partitions == plan.partitions


@pytest.mark.parametrize("remat", ["plan", "never"])
def test_a_plan_above_its_own_capacity_is_refused(plan: Plan, remat: str) -> None:
    """The worker, what the plan needs and what there is; with the check off it is built."""
    workload, large = assigner.load_workload(ENTRY), predicted(plan, peak=2.4e6, capacity=2e6)
    with pytest.raises(assigner.InfeasibleError, match=r"worker:0/cpu: the plan needs 2\.29 MiB .* has 1\.91 MiB"):
        assigner.Pipeline(workload, large, graph=cut(ENTRY), remat=remat)
    with assigner.Pipeline(workload, large, graph=cut(ENTRY), remat=remat, check_memory=False) as pipeline:
        assert pipeline.partitions == plan.partitions


def test_a_plan_above_what_is_free_now_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made for more memory than this machine has left."""
    monkeypatch.setattr(membership, "free_bytes", lambda _: 900_000)
    with pytest.raises(assigner.InfeasibleError, match=r"worker:0: the plan needs 977 KiB .* 879 KiB are free"):
        assigner.Pipeline(assigner.load_workload(ENTRY), plan, graph=cut(ENTRY))


@pytest.mark.parametrize(("pools", "refused"), [((7.0, 7.0), True), ((7.0, 8.0), False)])
def test_ranks_that_share_memory_need_all_of_their_peaks_of_it(
    plan: Plan, pools: tuple[float, ...], refused: bool
) -> None:
    """Each of two has room for its own peak, and both together have not; in groups of their own they have."""
    told = [[1e6, 1.8e6, 0.0, pools[0]], [1e6, 1.9e6, 0.1e6, pools[1]]]
    words = "worker:0 and worker:1: the plan needs 1.91 MiB at their peaks, and 1.81 MiB are free there now"
    with pytest.raises(assigner.InfeasibleError, match=words) if refused else nullcontext():
        membership.check_room(plan.predicted_workers, told)


def test_rematerialising_everything_needs_less_than_was_predicted(plan: Plan) -> None:
    """So the prediction says nothing of such a run, and it is not refused."""
    large = predicted(plan, peak=2.4e6, capacity=2e6)
    with assigner.Pipeline(assigner.load_workload(ENTRY), large, graph=cut(ENTRY), remat="always") as pipeline:
        assert pipeline.partitions == plan.partitions
