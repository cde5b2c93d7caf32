"""Stages that several workers share: what they train is what one worker trains, or it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from forked_ranks import cases_of

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

EXACT = 1e-9
USUAL = (
    "batch_norm",
    "dropout",
    "recurrence",
    "noise",
    "one_updates",
    "changed_gradients",
    "kept_gradients",
    "hooked_on_one",
    "left_out",
    "hooks",
    "small_buckets",
    "results",
    "states",
    "moves",
    "checkpoints",
)
DIVIDED = "divided_updates"


def assert_equal(found: dict[str, Any]) -> None:
    """No difference in any case is larger than rounding."""
    for case, differences in found.items():
        assert differences
        assert (case, {key: each for key, each in differences.items() if not each < EXACT}) == (case, {})


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of tests/runs/replicas.py found, of the cases that this run of the tests has."""
    cases = cases_of(request, "case")
    return forked.found("replicas.py", tmp_path_factory.mktemp("replicas"), *cases, DIVIDED, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", USUAL)
def test_equal_to_one_worker(ranks, case):
    """State, results, checkpoints and moves are those of plain PyTorch, or of the same micro-batches on one worker."""
    for found in ranks:
        assert_equal({case: found[case]})


def test_divided_updates_are_those_of_every_worker(ranks):
    """Workers that update a stage's partitions for each other have the same bits, and a part of the state each."""
    for found in ranks:
        assert set(found[DIVIDED].values()) == {0.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("cases", "captured"),
    [
        (("clipping", "weights", "accumulation", "frozen", "scaling"), "capture_loops"),
        pytest.param(("optimizers", "schedulers", "half", "sparse"), "capture_all", marks=pytest.mark.sweep),
    ],
    ids=["loops", "the others"],
)
def test_training_loops_are_the_plain_ones(forked, tmp_path, cases, captured):
    """Clipping, weights of losses, accumulation, frozen and sparse weights and scales are the plain loop's."""
    for found in forked.found("replicas.py", tmp_path, *cases, ranks=3, before=f"training_cases:{captured}"):
        assert {name.partition(",")[0] for name in found} == set(cases)
        assert_equal(found)


def test_equal_to_distributed_data_parallel(forked, tmp_path):
    """One stage on two ranks trains what torch's own DistributedDataParallel trains."""
    for found in forked.found("replicas.py", tmp_path, "beside", ranks=2):
        assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a counter in a buffer", "in the first step: its forward writes 0.calls, which another worker holds too"),
        ("a counter in Python", "share partition '0', and its forward changes 0.calls: each of them"),
        ("a normaliser", "1.mean"),
        ("a counter of large values", "share partition '1', and its forward changes 1.found: each of them"),
        ("a counter of evaluations", "share partition '1', and its forward changes what its modules keep: each"),
        ("a hook that counts", "share partition '0', and its forward changes what its modules keep: each"),
        ("attributes of their own", "the model's builder makes 1.factors['out'] of other numbers"),
        ("weights of the script", "share partition 'parts.0', and the script has given it other values on one of them"),
        ("noise of the script", "hold copies of last.bias, and these have come apart, by"),
        (
            "noise of the script, tied",
            "worker:0/cpu, worker:1/cpu, worker:2/cpu hold copies of tokens.weight, and these",
        ),
        ("clipped on one", "since the last step the script has changed it, its gradient or its optimizer's"),
        ("clipped on one, divided", "hold copies of the gradient of last.bias, and these have come apart"),
        ("momentum that one worker forgets", "hold copies of last.bias, and these have come"),
        ("noise, and weights handed out", "not at all"),
        ("SparseAdam", "SparseAdam takes sparse gradients alone, and that of"),
        ("SparseAdam, divided", "is added up over the 3 workers that hold it"),
        ("a norm of all in the optimizer", "looks at several parameters at once"),
        ("a mean between partitions", "share partition 'first', and its forward changes mean: each of them would see"),
        ("a loss over the batch", "share partition 'last', and the loss is over the whole batch: each of them"),
        ("a loss that counts", "share partition 'last', and Workload.loss or one of Workload.metrics keeps something"),
        ("a metric that counts", "share partition 'last', and Workload.loss or one of Workload.metrics keeps"),
        ("carried state", "share partition 'encoder', and the workload carries state from batch to batch"),
        ("LBFGS", "LBFGS.step needs a closure"),
        ("LBFGS, one updates for all", "under this one 3 workers have parameters"),
        ("frozen on one", "hold copies of parts.1.bias, and its requires_grad is True on one of them and False on"),
        ("no number on one", "hold copies of parts.1.bias, and these have come apart, by inf"),
        ("statistics of micro-batches", "with batch_norm='micro_batch' every micro-batch moves the running statistics"),
        ("weights of their own", "the model's builder makes 1.weight of other numbers on worker:1"),
    ],
)
def test_what_cannot_be_shared_is_refused(ranks, case, words):
    """On every rank, before the update that it would spoil, with the partition and what its forwards change."""
    for found in ranks:
        assert words in found["refusals"][case]
