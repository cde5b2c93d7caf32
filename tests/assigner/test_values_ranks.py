"""Values of every kind, other graphs and eval on two ranks: what tests/runs/values.py found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from odd_values import CASES

pytestmark = pytest.mark.distributed

RUN = Path(__file__).resolve().parent.parent / "runs" / "values.py"
EXACT = 1e-9


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks found."""
    folder = tmp_path_factory.mktemp("values")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", RUN, folder],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", [*CASES, "other shapes"])
def test_equal_to_the_plain_model(ranks, case):
    """Loss, gradients and outputs of every rank are the plain model's, in training and in eval between the steps."""
    for found in ranks:
        assert found[case]
        assert max(found[case].values()) < EXACT


def test_training_does_not_notice_evaluations(ranks):
    """With dropout, losses are to the last bit the same with evaluations between the steps."""
    assert [found["dropout after eval"] for found in ranks] == [{"loss": 0.0}] * 2


def test_inference_alone(ranks):
    """The rank that asks gets the output, wherever it is made; no rank holds a parameter that wants a gradient."""
    for found in ranks:
        assert max(found["inference"].values()) < EXACT
