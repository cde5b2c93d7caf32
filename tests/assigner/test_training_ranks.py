"""A training loop on three ranks gives what the same loop gives in plain PyTorch, and the same numbers on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_cases import CASES
from workloads import language

pytestmark = pytest.mark.distributed

EXACT = 1e-10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/training.py found."""
    folder = tmp_path_factory.mktemp("training")
    run = Path(__file__).resolve().parent.parent / "runs" / "training.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(run), str(folder)],
        capture_output=True, text=True, timeout=400, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_loop(ranks, case):
    """Losses, gradients, weights, norms, scales and learning rates are the plain loop's on every rank."""
    for found in ranks:
        for placement, differences in found[case].items():
            assert differences
            assert (placement, {key: each for key, each in differences.items() if not each < EXACT}) == (placement, {})


def test_an_overflow_on_one_rank_is_one_on_all(ranks):
    """Norms, scales and numbers of updates are to the last bit the same everywhere; only one rank saw the overflow."""
    assert ranks[0]["alike"]["scales"] == ranks[1]["alike"]["scales"] == ranks[2]["alike"]["scales"]
    assert ranks[0]["alike"]["norms"] == ranks[1]["alike"]["norms"] == ranks[2]["alike"]["norms"]
    assert ranks[0]["alike"]["norms"][0] in ("inf", "nan")
    assert ranks[0]["alike"]["scales"][0] == [2.0**41, 0]
    assert sorted(found["alike"]["first finite"] for found in ranks) == [False, True, True]


def test_a_norm_that_is_not_finite_is_refused_everywhere(ranks):
    """The error has the number, and the run goes on to skip the update."""
    assert len({found["not finite"] for found in ranks}) == 1
    assert ranks[0]["not finite"] in ("the norm of the gradients is inf", "the norm of the gradients is nan")


def test_one_scaler_for_all_ranks(ranks):
    """A scaler that is enabled on one rank is on all, and they stay together; other settings are refused everywhere."""
    assert ranks[0]["one scaler"] == ranks[1]["one scaler"] == ranks[2]["one scaler"]
    assert 0 < ranks[0]["one scaler"]["steps"] < 30
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
