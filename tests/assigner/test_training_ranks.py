"""A training loop on three ranks gives what the same loop gives in plain PyTorch, and the same numbers on each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from training_cases import CASES, SCALED
from training_optimizers import OPTIMIZERS, SCHEDULERS
from workloads import language

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = [pytest.mark.distributed, pytest.mark.long]

EXACT = 1e-10
BEFORE = "training_cases:capture_all"


@pytest.fixture(scope="module")
def ranks(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/training.py found."""
    return forked.found("training.py", tmp_path_factory.mktemp("training"), ranks=3, before=BEFORE)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_loop(ranks, case):
    """Losses, gradients, weights, norms, scales and learning rates are the plain loop's on every rank."""
    for found in ranks:
        for placement, differences in found[case].items():
            assert differences
            assert (placement, {key: each for key, each in differences.items() if not each < EXACT}) == (placement, {})


@pytest.mark.sweep
def test_every_case_is_equal_where_a_rank_idles(forked, tmp_path):
    """Also optimizers that do the same to each parameter, whoever has it, and schedulers in both kinds of loop."""
    for found in forked.found("training.py", tmp_path, "every", ranks=3, before=BEFORE):
        for case, names in (("optimizers", OPTIMIZERS), ("schedulers", SCHEDULERS)):
            assert {key.partition(": ")[0] for key in found[case]["one_idle"]} == set(names)
        for case in CASES:
            differences = found[case]["one_idle"]
            assert differences
            assert (case, {key: each for key, each in differences.items() if not each < EXACT}) == (case, {})


def test_an_overflow_on_one_rank_is_one_on_all(ranks):
    """Norms, scales and numbers of updates are to the last bit the same everywhere; only one rank saw the overflow."""
    assert ranks[0]["alike"]["scales"] == ranks[1]["alike"]["scales"] == ranks[2]["alike"]["scales"]
    assert ranks[0]["alike"]["norms"] == ranks[1]["alike"]["norms"] == ranks[2]["alike"]["norms"]
    assert ranks[0]["alike"]["norms"][0] in ("inf", "nan")
    assert ranks[0]["alike"]["scales"][0] == [2.0**41, 0]
    assert sorted(found["alike"]["first finite"] for found in ranks) == [False, True, True]


def test_a_norm_over_one_ranks_parameters_clips_nothing(ranks):
    """It is another norm on every rank, and no loss would show it; what treats each parameter by itself goes on."""
    for found in ranks:
        told = found["by hand"]
        for name in ("by_one_norm", "between", "twice"):
            assert re.search(
                r"before the update the script has multiplied all gradients of worker:0 by 0\.\d+, worker:1 by 0\.\d+,"
                r" worker:2 by 0\.\d+, as torch\.nn\.utils\.clip_grad_norm_ over pipeline\.named_parameters\(\) does",
                told.pop(name),
            )
        assert "has changed weights by a number of each rank's own (" in told.pop("climb")
        assert told == dict.fromkeys(
            ["each_by_its_norm", "all_alike", "each_rank_by_a_number", "climb_each"], "1 update"
        )


def test_a_norm_that_is_not_finite_is_refused_everywhere(ranks):
    """The error has the number, and the run goes on to skip the update."""
    assert len({found["not finite"] for found in ranks}) == 1
    assert ranks[0]["not finite"] in ("the norm of the gradients is inf", "the norm of the gradients is nan")


def test_one_scaler_for_all_ranks(ranks):
    """A scaler that is enabled on one rank is on all, and they stay together; other settings are refused everywhere."""
    assert ranks[0]["one scaler"] == ranks[1]["one scaler"] == ranks[2]["one scaler"]
    assert 0 < ranks[0]["one scaler"]["steps"] < SCALED
    assert ranks[0]["one scaler"]["state"]["growth_interval"] == 3
    assert ranks[0]["one scaler"]["error"] == "the scaler's growth_interval is 5 on worker:0 and 6 on worker:2"


def test_training_goes_on_elsewhere(ranks):
    """Scheduler, scale and data position come back under another plan; losses and rates are those without a break."""
    for found in ranks:
        assert found["checkpoint"]["loss"] < EXACT
        assert found["checkpoint"]["same rates"]


def test_the_handles_state(ranks):
    """States of all ranks are one by name, groups are alike, and another placement takes them."""
    model = language().model()
    for found in ranks:
        assert found["handle"]["names"] == sorted(name for name, _ in model.named_parameters())
        assert found["handle"]["groups alike"]
        assert found["handle"]["loss"] < EXACT
